"""Modules: what parameters and buffers may be like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.conformance.case import case
from tests.conformance.lab import Lab, dataset, loss_of
from tests.conformance.optimization import fit

GROUP = "Modules"


@case(GROUP, "tied parameters")
def tied(lab: Lab) -> Any:
    class Tied:
        def build(self: Any) -> None:
            self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.second.weight = self.first.weight

        def forward(self: Any, x: Tensor) -> Tensor:
            return self.head(self.second(torch.relu(self.first(x))))

    module = lab.regression(Tied)
    lab.fit(module)
    return {"loss": loss_of(module), "tied": module.second.weight is module.first.weight}


@case(
    GROUP,
    "frozen parameters",
    note="Not exchanged. If a program changes them, all workers take worker 0's at each sync point.",
)
def frozen(lab: Lab) -> Any:
    class Frozen:
        def build(self: Any) -> None:
            self.body, self.head = nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 1)

        def forward(self: Any, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    return fit(lab, Frozen)


@case(
    GROUP,
    "parameters unfrozen later (`BackboneFinetuning`)",
)
def unfrozen(lab: Lab) -> Any:
    class Backbone:
        def build(self: Any) -> None:
            self.backbone, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 1)

        def forward(self: Any, x: Tensor) -> Tensor:
            return self.head(self.backbone(x))

        def configure_optimizers(self: Any) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.03)

    module = lab.regression(Backbone)
    before = module.backbone[0].weight.detach().clone()
    finetuning = lab.pl.callbacks.BackboneFinetuning(1, backbone_initial_lr=0.05, verbose=False)
    lab.fit(module, callbacks=[finetuning], max_epochs=3, ddp={"find_unused_parameters": True})
    return {"loss": loss_of(module), "trained": not torch.equal(module.backbone[0].weight, before)}


@case(
    GROUP,
    "parameters unfrozen in the middle of an epoch",
    note="Each worker trains them alone up to the next sync point, which averages them.",
)
def unfrozen_within_an_epoch(lab: Lab) -> Any:
    class Late:
        def build(self: Any) -> None:
            self.body, self.head = nn.Linear(8, 16).requires_grad_(False), nn.Linear(16, 1)

        def forward(self: Any, x: Tensor) -> Tensor:
            return self.head(self.body(x))

        def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                self.body.requires_grad_(True)

    return fit(lab, Late, max_epochs=3, ddp={"find_unused_parameters": True})


@case(GROUP, "unused parameters", note="DDP needs `find_unused_parameters=True`.")
def unused(lab: Lab) -> Any:
    class Unused:
        def build(self: Any) -> None:
            self.net, self.spare = nn.Linear(8, 1), nn.Linear(3, 3)

    return fit(lab, Unused, ddp={"find_unused_parameters": True})


@case(GROUP, "several dtypes in one module")
def dtypes(lab: Lab) -> Any:
    class Mixed:
        def build(self: Any) -> None:
            self.a = nn.Linear(8, 8)
            self.b = nn.Linear(8, 8, dtype=torch.float64)
            self.c = nn.Linear(8, 1, dtype=torch.bfloat16)

        def forward(self: Any, x: Tensor) -> Tensor:
            x = self.b(torch.relu(self.a(x.float())).double())
            return nn.functional.linear(x.float(), self.c.weight.float(), self.c.bias.float())

    module = lab.regression(Mixed)
    lab.fit(module)
    return {"dtypes": [str(p.dtype) for p in module.parameters()], "loss": loss_of(module)}


@case(GROUP, "complex parameters", ddp_since="2.15.0")  # 2.6 cannot broadcast them over gloo
def complex_numbers(lab: Lab) -> Any:
    class Complex:
        def build(self: Any) -> None:
            self.net = nn.Linear(8, 1, dtype=torch.complex64)

        def forward(self: Any, x: Tensor) -> Tensor:
            return nn.functional.linear(x.to(torch.complex64), self.net.weight, self.net.bias).real

        def loss(self: Any, batch: Any) -> Tensor:
            return ((self(batch[0]) - batch[1]) ** 2).mean()

    lab.fit(lab.regression(Complex))


@case(GROUP, "`channels_last` and other strided parameters")
def strided(lab: Lab) -> Any:
    class Strided:
        def build(self: Any) -> None:
            self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
            self.weight = nn.Parameter(torch.randn(8, 4).t())
            self.head = nn.Linear(8, 1)

        def forward(self: Any, x: Tensor) -> Tensor:
            seen = self.conv(x.view(-1, 2, 2, 2)).flatten(1)
            return self.head(torch.cat([seen, x @ self.weight.t()], 1))

    module = lab.regression(Strided)
    lab.fit(module)
    return {
        "loss": loss_of(module),
        "strides": [module.conv.weight.stride(), module.weight.stride()],
    }


@case(GROUP, "module built in `configure_model`")
def configure_model(lab: Lab) -> Any:
    class Late:
        def build(self: Any) -> None:
            self.net = None

        def configure_model(self: Any) -> None:
            if self.net is None:
                self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    return fit(lab, Late)


@case(GROUP, "lazy module that has seen a batch in `configure_model`")
def lazy(lab: Lab) -> Any:
    class Lazy:
        def build(self: Any) -> None:
            self.net = nn.LazyLinear(1)

        def configure_model(self: Any) -> None:
            self.net(torch.zeros(1, 8))

    return fit(lab, Lazy)


@case(
    GROUP,
    "lazy module that has not seen a batch",
    refused="Parameter 'net.weight' has no shape yet",
    note="The servers must know all shapes when `fit` begins.",
    ddp_fails=True,
)
def lazy_unseen(lab: Lab) -> Any:
    class Lazy:
        def build(self: Any) -> None:
            self.net = nn.LazyLinear(1)

    return fit(lab, Lazy)


@case(
    GROUP,
    "no trainable parameter",
    refused="trainable",
    note="There is nothing to exchange.",
    ddp_fails=True,
)
def nothing_to_train(lab: Lab) -> Any:
    class Nothing:
        def build(self: Any) -> None:
            self.net = nn.Linear(8, 1).requires_grad_(False)

    return fit(lab, Nothing)


class Normalised:
    """With batch norm."""

    def build(self: Any) -> None:
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


@case(
    GROUP,
    "batch norm",
    note="Sync points average running statistics over the workers; DDP keeps worker 0's.",
)
def batch_norm(lab: Lab) -> Any:
    module = lab.regression(Normalised)
    lab.fit(module)
    return {"loss": loss_of(module)}


@case(
    GROUP,
    "`sync_batchnorm=True`",
    note=(
        "It has no effect, and a warning says so. Each worker normalises by its own batches; sync "
        "points average the statistics."
    ),
    differs=("layers",),
    ddp=False,
)
def sync_batch_norm(lab: Lab) -> Any:
    module = lab.regression(Normalised)
    lab.fit(module, sync_batchnorm=True)
    return {"loss": loss_of(module), "layers": [type(m).__name__ for m in module.net]}


@case(GROUP, "weight norm and other parametrizations")
def parametrized(lab: Lab) -> Any:
    class Parametrized:
        def build(self: Any) -> None:
            self.net = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 1))

    module = lab.regression(Parametrized)
    lab.fit(module)
    x, y = dataset().tensors
    return {"loss": float(nn.functional.mse_loss(module.eval()(x), y).detach())}


@case(GROUP, "parameters replaced between two fits")
def replaced(lab: Lab) -> Any:
    module = lab.regression()
    lab.fit(module)
    torch.manual_seed(8)
    module.net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 1))
    lab.fit(module)
    return {"loss": loss_of(module)}


@case(GROUP, "buffers and parameters replaced during fit by others of the same shape")
def reassigned(lab: Lab) -> Any:
    class Reassigning:
        def build(self: Any) -> None:
            self.net = nn.Linear(8, 1)
            self.register_buffer("seen", torch.zeros(8))

        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            self.seen = 0.9 * self.seen + 0.1 * batch[0].mean(0)
            self.net.weight.data = self.net.weight.data.clone()
            return self.loss(batch)

    return fit(lab, Reassigning, ddp={"broadcast_buffers": False}) | {"moved": True}


@case(
    GROUP,
    "buffers of any values and shapes",
    note="At sync points all workers take worker 0's. More kinds are [below](#buffers).",
)
def buffers_of_all_kinds(lab: Lab) -> Any:
    class Keeping:
        def build(self: Any) -> None:
            self.net = nn.Linear(8, 1)
            self.register_buffer("mask", torch.zeros(2))
            self.register_buffer("bank", torch.zeros(0, 8))
            self.register_buffer("total", torch.zeros(()))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("warm", torch.ones((), dtype=torch.bool))

        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            self.mask[1] = float("-inf")
            self.bank = torch.cat([self.bank, batch[0][: 1 + lab.rank]])
            self.total += 1e11
            self.count += 1
            self.warm.zero_()
            if lab.rank and not hasattr(self, "late"):
                self.register_buffer("late", torch.ones(3), persistent=False)
            return self.loss(batch)

    module = lab.regression(Keeping)
    lab.fit(module, ddp={"broadcast_buffers": False})
    mean = round(float(module.total / module.count) / 1e11, 3)
    return {"loss": loss_of(module), "mask": str(module.mask.tolist()), "mean": mean, "warm": bool(module.warm)}


@case(
    GROUP,
    "weights set in `on_train_start`, `on_train_epoch_start`, `on_validation_end` or `on_train_epoch_end`",
    note=(
        "They become the weights of all workers. Weights set in mid-epoch are mixed with the others' "
        "updates, and a warning says so."
    ),
)
def set_weights(lab: Lab) -> Any:
    set_last: list[float] = []

    def put(module: Any) -> None:
        set_last.append(len(set_last) + 1.0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.data = torch.full_like(parameter, set_last[-1])

    class Setting:
        lr = 0.0
        mixed = 0

        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            self.mixed += sum(int((p != set_last[-1]).sum()) for p in self.parameters())
            return self.loss(batch)

        def on_train_start(self: Any) -> None:
            put(self)

        on_train_epoch_start = on_validation_end = on_train_epoch_end = on_train_start

    module = lab.regression(Setting)
    lab.fit(module, val_check_interval=0.5)
    values = {float(value) for parameter in module.parameters() for value in parameter.flatten()}
    return {"mixed": module.mixed, "values": str(values), "sets": len(set_last)}


@case(GROUP, "a parameter without elements")
def empty_parameter(lab: Lab) -> Any:
    class Empty:
        def build(self: Any) -> None:
            self.net, self.nothing = nn.Linear(8, 1), nn.Parameter(torch.empty(0, 3))

    return fit(lab, Empty, ddp={"find_unused_parameters": True})


@case(GROUP, "ranks that initialise their weights differently")
def seeds(lab: Lab) -> Any:
    module = lab.regression()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(lab.rank)
    lab.fit(module)
    return {"loss": loss_of(module)}


@case(
    GROUP,
    "ranks whose modules differ",
    refused=r"net\.0\.weight",
    note="The error names the first parameter that differs. DDP hangs.",
    ddp=False,
)
def different(lab: Lab) -> Any:
    module = lab.regression()
    if lab.rank == 1:
        module.net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 1))
    lab.fit(module)
