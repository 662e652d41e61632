"""One worker trains as one device does, bit for bit, and so do its checkpoints of every step."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.algorithms import ASGD, Hogwild, LayerWise, LocalSGD
from lightning_asgd.core.lightning.checkpointing import KEY
from tests.component.test_exchange import NEEDS_SHARED_MEMORY
from tests.conformance import optimization
from tests.conformance.case import CASES
from tests.conformance.lab import STEPS, Lab
from tests.helpers.script import bits

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
EPOCHS = 7  # 224 steps
OPTIMIZERS = [name for name, case in CASES.items() if case.group == optimization.GROUP]


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a checkpoint by its place; tensors by their bits."""
    if isinstance(value, Tensor):
        yield path, (str(value.dtype), tuple(value.shape), bits(value.cpu().to_dense()))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flat(item, f"{path}.{index}")
    else:
        yield path, repr(value)


@dataclass
class OneDevice(Lab):
    """Runs the battery's cases on one device, and keeps a checkpoint of every batch in memory."""

    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    batches: int = STEPS  # per epoch

    def trainer(self, *, callbacks: Any = (), **options: Any) -> Any:
        lab = self

        class Memory(importlib.import_module(f"{self.pl.__name__}.plugins").TorchCheckpointIO):  # type: ignore[misc]
            def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
                lab.checkpoints.append(copy.deepcopy(checkpoint))

        class Saver(self.pl.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                trainer.save_checkpoint("unused")

        options["max_epochs"] = max(options.get("max_epochs", 1), EPOCHS - 1) * options.get(
            "accumulate_grad_batches", 1
        )
        about = {
            "devices": 1,
            "use_distributed_sampler": False,
            "limit_train_batches": self.batches,
            "plugins": [Memory()],
        }
        return super().trainer(callbacks=[*callbacks, Saver()], **{**options, **about})

    def loader(self, *args: Any, **options: Any) -> Any:
        return super().loader(*args, **{"shuffle": "seed" not in options, **options})


def run(name: str, package: str, folder: Path, strategy: Any) -> tuple[OneDevice, dict[str, Any]]:
    lab = OneDevice(importlib.import_module(package), lambda **_: strategy, folder, 0)
    facts = CASES[name].run(lab)
    return lab, facts


def check_same(ours: OneDevice, theirs: OneDevice) -> None:
    assert [(r.event, r.epoch, r.step, r.digest, r.metrics) for r in ours.records] == [
        (r.event, r.epoch, r.step, r.digest, r.metrics) for r in theirs.records
    ]
    assert len(ours.checkpoints) == len(theirs.checkpoints) >= 6 * ours.batches
    for number, (mine, other) in enumerate(zip(ours.checkpoints, theirs.checkpoints, strict=True)):
        mine = {key: value for key, value in mine.items() if key not in (KEY, "callbacks")}
        other = {key: value for key, value in other.items() if key != "callbacks"}
        assert dict(flat(mine)) == dict(flat(other)), f"checkpoint {number}"


def cases() -> Iterator[Any]:
    """All on both Lightnings; all but a few are slow."""
    for number, name in enumerate(OPTIMIZERS):
        for package in PACKAGES:
            usual = number % 9 == 0 and package == PACKAGES[0] and name not in ("compiled", "lbfgs")
            yield pytest.param(name, package, id=f"{name}-{package}", marks=[] if usual else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "package"), cases())
def test_every_optimizer_gives_the_bits_of_one_device(name: str, package: str, tmp_path: Path) -> None:
    theirs, expected = run(name, package, tmp_path, "auto")
    ours, facts = run(name, package, tmp_path, ASGDStrategy(nsync=7))
    assert facts == expected
    check_same(ours, theirs)


class Odd:
    """Batch norm, random numbers, and buffers that a program counts with, one of which goes back to 0."""

    def build(self: Any) -> None:
        layers = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.net = nn.Sequential(*layers)
        self.wide = nn.Linear(8, 1, dtype=torch.float64)
        self.register_buffer("pointer", torch.tensor(0))
        self.register_buffer("queue", torch.zeros(5))

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x) + 0.1 * self.wide(x.double()).float()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.queue[int(self.pointer)] = loss.detach()
        self.pointer.copy_((self.pointer + 1) % 5)
        return loss + torch.rand(()) * 0.01 * self.wide.weight.float().square().sum()

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def odd(strategy: Any, folder: Path, callbacks: tuple[str, ...] = (), package: str = PACKAGES[0]) -> OneDevice:
    pl = importlib.import_module(package)
    pl.seed_everything(3, verbose=False)
    lab = OneDevice(pl, lambda **_: strategy, folder, 0, batches=12)
    made = {
        "swa": lambda: pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=3),
        "ema": lambda: pl.callbacks.EMAWeightAveraging(decay=0.9),
        "accumulation": lambda: pl.callbacks.GradientAccumulationScheduler({2: 2}),
    }
    module = lab.regression(Odd)
    lab.fit(module, callbacks=[made[name]() for name in callbacks])
    return lab


WAYS: dict[str, dict[str, Any]] = {
    "after every step": {"nsync": 1, "advanced": Advanced(overlap=False), "num_servers": 3},
    "auto": {"nsync": "auto"},
    "fetches and pushes apart": {"advanced": Advanced(npush=3, nfetch=5), "algorithm": ASGD("sum")},
    "local SGD": {"algorithm": LocalSGD(), "nsync": 5},
    "Hogwild": {"algorithm": Hogwild()},
    "Hogwild with copies": {"algorithm": Hogwild(copies=True)},
    "layer-wise": {"algorithm": LayerWise()},
    "zmq": {"nsync": 5, "transport": "zmq"},
}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> OneDevice:
    return odd("auto", tmp_path_factory.mktemp("one"))


USUAL = ("after every step", "local SGD", "Hogwild", "zmq")


@NEEDS_SHARED_MEMORY
@pytest.mark.parametrize("way", [way if way in USUAL else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_every_way_to_exchange_gives_the_bits_of_one_device(way: str, one_device: OneDevice, tmp_path: Path) -> None:
    if WAYS[way].get("transport") == "zmq":
        pytest.importorskip("zmq")
    check_same(odd(ASGDStrategy(**WAYS[way]), tmp_path), one_device)


@pytest.mark.parametrize(
    ("callbacks", "package"),
    [
        pytest.param(("swa",), PACKAGES[1], marks=pytest.mark.slow),
        (("ema",), PACKAGES[0]),
        pytest.param(("accumulation",), PACKAGES[0], marks=pytest.mark.slow),
    ],
)
def test_callbacks_that_change_weights_give_the_bits_of_one_device(
    callbacks: tuple[str, ...], package: str, tmp_path: Path
) -> None:
    theirs = odd("auto", tmp_path, callbacks, package)
    check_same(odd(ASGDStrategy(), tmp_path, callbacks, package), theirs)


@pytest.mark.parametrize("package", [PACKAGES[0], pytest.param(PACKAGES[1], marks=pytest.mark.slow)])
def test_resuming_from_any_step_gives_the_bits_of_one_device(package: str, tmp_path: Path) -> None:
    pl = importlib.import_module(package)
    seen: dict[tuple[str, int], Any] = {}
    for kind, strategy in (("theirs", lambda **_: "auto"), ("ours", lambda **_: ASGDStrategy(nsync=4))):
        for start in (0, 1, 7, 12, 18):  # after 12 steps an epoch ends
            lab = OneDevice(pl, strategy, tmp_path, 0, batches=12)
            saver = pl.callbacks.ModelCheckpoint(
                tmp_path / kind, "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
            )
            pl.seed_everything(3, verbose=False)
            module = lab.regression(Odd)
            about = {"devices": 1, "use_distributed_sampler": False, "limit_train_batches": 12, "max_epochs": 2}
            trainer = Lab.trainer(lab, callbacks=[] if start else [saver], **about)
            ckpt = tmp_path / kind / f"step={start}.ckpt" if start else None
            pl.seed_everything(4, verbose=False)  # no checkpoint holds the state of random number generators
            trainer.fit(module, lab.loader(), lab.loader(64, seed=1), ckpt_path=ckpt)
            records = [(r.event, r.epoch, r.step, r.digest, r.metrics) for r in lab.records]
            seen[kind, start] = records, dict(flat(trainer.optimizers[0].state_dict())), trainer.global_step
    assert sorted(f.name for f in (tmp_path / "ours").iterdir()) == sorted(f"step={n}.ckpt" for n in range(1, 25))
    for (kind, start), outcome in seen.items():
        assert outcome == seen["theirs", start], (kind, start)
    assert seen["ours", 0][2] == 24
