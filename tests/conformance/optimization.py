"""Optimization: who steps, with what, how often."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.case import case
from tests.conformance.lab import STEPS, Lab, loss_of

GROUP = "Optimization"


def fit(lab: Lab, override: type = object, **options: Any) -> dict[str, Any]:
    """Fit the regression, and tell its loss and its last learning rates."""
    module = lab.regression(override)
    trainer = lab.fit(module, **options)
    return {"loss": loss_of(module), "rates": rates(trainer)}


def rates(trainer: Any) -> list[float]:
    return [round(float(group["lr"]), 9) for o in trainer.optimizers for group in o.param_groups]


@case(GROUP, "automatic optimization")
def automatic(lab: Lab) -> Any:
    return fit(lab)


@case(GROUP, "Adam")
def adam(lab: Lab) -> Any:
    class Adam:
        def configure_optimizers(self: Any) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.02)

    return fit(lab, Adam)


class Manual:
    """Manual optimization with a scheduler stepped by hand."""

    automatic_optimization = False

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]


@case(
    GROUP,
    "manual optimization, scheduler stepped by hand",
    differs=("rates",),
    note=(
        "The scheduler counts the worker's own batches, whose number depends on its speed. With "
        '`data="split"` it is as under DDP.'
    ),
)
def manual(lab: Lab) -> Any:
    return fit(lab, Manual)


@case(GROUP, "manual optimization with a raw optimizer, and a last step with `trainer.is_last_batch`")
def raw(lab: Lab) -> Any:
    class Raw:
        automatic_optimization = False

        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.manual_backward(self.loss(batch))
            if (batch_idx + 1) % 5 == 0 or self.trainer.is_last_batch:
                optimizer.step()
                optimizer.zero_grad()

    return fit(lab, Raw)


@case(GROUP, "two optimizers in turns (a GAN), `toggle_optimizer`")
def gan(lab: Lab) -> Any:
    class Gan:
        automatic_optimization = False

        def build(self: Any) -> None:
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
            self.critic = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            x, y = batch
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            fooled = -self.critic(torch.cat([x, self(x)], 1)).mean() * 0.01
            first.zero_grad()
            self.manual_backward(fooled + self.loss(batch))
            first.step()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            fake = self.critic(torch.cat([x, self(x).detach()], 1))
            real = self.critic(torch.cat([x, y], 1))
            second.zero_grad()
            self.manual_backward((fake**2).mean() + ((real - 1) ** 2).mean())
            second.step()
            self.untoggle_optimizer(second)

        def configure_optimizers(self: Any) -> Any:
            return [
                torch.optim.SGD(self.net.parameters(), lr=0.03, momentum=0.5),
                torch.optim.SGD(self.critic.parameters(), lr=0.01),
            ]

    return fit(lab, Gan, ddp={"find_unused_parameters": True})


@case(GROUP, "gradient accumulation", note="`nsync` counts optimizer steps, not batches.")
def accumulation(lab: Lab) -> Any:
    return fit(lab, accumulate_grad_batches=3)


@case(GROUP, "clipping by norm", note="Each worker clips the gradients of its own batch.")
def clip_norm(lab: Lab) -> Any:
    return fit(lab, gradient_clip_val=1.0)


@case(GROUP, "clipping by value", note="Each worker clips the gradients of its own batch.")
def clip_value(lab: Lab) -> Any:
    return fit(lab, gradient_clip_val=0.5, gradient_clip_algorithm="value")


@case(GROUP, '`precision="bf16-mixed"`')
def bf16_mixed(lab: Lab) -> Any:
    return fit(lab, precision="bf16-mixed")


@case(GROUP, '`precision="64-true"`')
def double(lab: Lab) -> Any:
    module = lab.regression()
    lab.fit(module, precision="64-true")
    return {"loss": loss_of(module), "dtype": str(next(module.parameters()).dtype)}


@case(
    GROUP,
    '`precision="bf16-true"`',
    note="Exchanged as bfloat16. Servers add up in float32; checkpoints do not hold that copy.",
)
def bf16_true(lab: Lab) -> Any:
    module = lab.regression()
    lab.fit(module, precision="bf16-true")
    return {"loss": loss_of(module), "dtype": str(next(module.parameters()).dtype)}


@case(GROUP, "`OneCycleLR` with `trainer.estimated_stepping_batches`")
def one_cycle(lab: Lab) -> Any:
    class OneCycle:
        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            steps = self.trainer.estimated_stepping_batches
            assert steps == 6 * STEPS
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return fit(lab, OneCycle, max_epochs=6)  # without momentum two epochs leave much to chance, under DDP too


@case(GROUP, "`ReduceLROnPlateau`", note="Log its value with `sync_dist=True`.")
def plateau(lab: Lab) -> Any:
    class Plateau:
        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "progress"}}

    return fit(lab, Plateau, max_epochs=3)


@case(GROUP, "schedulers per epoch")
def step_lr(lab: Lab) -> Any:
    class PerEpoch:
        def configure_optimizers(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return fit(lab, PerEpoch)


@case(GROUP, "`torch.compile`d module")
def compiled(lab: Lab) -> Any:
    module = lab.regression()
    lab.fit(torch.compile(module, backend="eager"))
    return {"loss": loss_of(module)}


@case(
    GROUP,
    "LBFGS with a line search",
    note=(
        "Use a large `nsync`: its past gradients lack the other workers' contributions. Under DDP "
        "workers can wait forever."
    ),
    ddp=False,
)
def lbfgs(lab: Lab) -> Any:
    class Lbfgs:
        def configure_optimizers(self: Any) -> Any:
            # With more history it diverges on mini-batches: on some processors to NaN, on one device too.
            return torch.optim.LBFGS(self.parameters(), max_iter=4, history_size=5, line_search_fn="strong_wolfe")

    return fit(lab, Lbfgs)


@case(GROUP, "Adafactor")
def adafactor(lab: Lab) -> Any:
    class Factored:
        def configure_optimizers(self: Any) -> Any:
            return torch.optim.Adafactor(self.parameters(), lr=0.05)

    return fit(lab, Factored, max_epochs=4)


@case(
    GROUP,
    "sparse embedding with `SparseAdam`",
    note="Only rows that have changed are exchanged; in islands all.",
)
def sparse_adam(lab: Lab) -> Any:
    class Sparse:
        def build(self: Any) -> None:
            self.table = nn.EmbeddingBag(32, 4, sparse=True)
            self.net = nn.Linear(12, 1)

        def forward(self: Any, x: Tensor) -> Tensor:
            rows = (x.abs() * 8).long().clamp(max=31)
            return self.net(torch.cat([x, self.table(rows)], 1))

        def configure_optimizers(self: Any) -> Any:
            return [
                torch.optim.SparseAdam(self.table.parameters(), lr=0.01),
                torch.optim.SGD(self.net.parameters(), lr=0.05),
            ]

        automatic_optimization = False

        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in optimizers:
                optimizer.step()

    return fit(lab, Sparse)


@case(
    GROUP,
    "a batch that is skipped (`training_step` returns None)",
    refused="Skipping the `training_step` by returning None",
    note="Lightning allows it on one device only. With manual optimization any worker may skip a step.",
    ddp_fails=True,
)
def skipped(lab: Lab) -> Any:
    class Skipping:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 3 == 0 else self.loss(batch)

    return fit(lab, Skipping)


@case(
    GROUP,
    "one worker alone skips steps, with manual optimization",
    note="Under DDP the others wait forever.",
    ddp=False,
)
def skipped_by_one(lab: Lab) -> Any:
    class Skipping(Manual):
        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0 or batch_idx % 2:
                super().training_step(batch, batch_idx)

    return fit(lab, Skipping)
