"""The program that :mod:`islands` has torchrun start and restart: an island whose weights count the trained samples.

    torchrun --standalone --nproc-per-node=2 --max-restarts=20 benchmarks/islands_program.py FOLDER ddp|fsdp2

The environment says which run it joins: LIGHTNING_ASGD_RUN.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from counts import fit, numbers
from engines_program import ENGINE, NSYNC, SAMPLES, SILENCE_S, STEP_S, Report
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.nn import functional

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD

BATCH = 1  # of a process


def inside_of(name: str, ranks: int, **options: Any) -> Any:
    """Lightning's strategy inside an island."""
    return DDPStrategy(**options) if name == "ddp" else ModelParallelStrategy(ranks, 1, **options)


class Task(pl.LightningModule):
    """Layers that FSDP2 shards one by one, a loss of classes, and an optimizer."""

    def __init__(self, layers: Sequence[nn.Module], optimizer: Callable[[Any], Any], *, sharded: bool) -> None:
        super().__init__()
        self.layers, self.optimizer, self.sharded = nn.Sequential(*layers), optimizer, sharded

    def configure_model(self) -> None:
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            self.sharded = False  # it is called for every fit, validation and test
            mesh = self.device_mesh["data_parallel"]
            for layer in self.layers:
                if list(layer.parameters()):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.layers, *batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())

    def whole(self) -> dict[str, Tensor]:
        """Copies of the parameters, none of them sharded. All ranks of an island ask together."""
        found: dict[str, Any] = dict(self.named_parameters())
        full = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in found.items()}
        return {name: tensor.detach().clone() for name, tensor in full.items()}


def loss_of(layers: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of every class that is predicted."""
    return functional.cross_entropy(layers(x).flatten(0, -2), y.flatten())


class Counts(Task):
    """Learns how often each sample was trained."""

    def __init__(self, *, sharded: bool, size: int) -> None:
        counts = nn.Embedding(SAMPLES, 1)
        nn.init.zeros_(counts.weight)
        # A gradient is the mean of those of the island's processes.
        super().__init__([counts], lambda parameters: torch.optim.SGD(parameters, lr=float(size)), sharded=sharded)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        return -self.layers(batch[0]).sum()

    @property
    def seen(self) -> Tensor:
        """How often, by sample. All processes ask together."""
        return self.whole()["layers.0.weight"].flatten()


class Steps(Report):
    """Tells also how long the island's steps took, and the longest time between two within an epoch and between two."""

    latest: tuple[float, int] | None = None

    def on_train_batch_end(self, trainer: Any, *about: Any) -> None:
        now, epoch = time.monotonic(), trainer.current_epoch
        if self.latest is not None:
            then, before = self.latest
            self.gaps[epoch == before].append(now - then)
        self.latest = now, epoch
        super().on_train_batch_end(trainer, *about)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.gaps: dict[bool, list[float]] = {False: [], True: []}  # between two epochs; within one

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        within, between = self.gaps[True], self.gaps[False]
        about = {"usual_s": statistics.median(within or [0.0]), "within_s": sorted(within)[-5:]}
        self.tell(**about, between_s=sorted(between)[-5:], steps=len(within))
        super().on_train_end(trainer, pl_module)


def main() -> None:
    imported = time.time()
    folder, inside = Path(sys.argv[1]), sys.argv[2]
    pl.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    engine = {name: os.environ[name] for name in ENGINE if name in os.environ}
    file = folder / f"{os.environ['ENGINES_NAME']}-{os.getpid()}.json"
    report = Steps(file, pid=os.getpid(), engine=engine, imported=imported)
    run: dict[str, Any] = {"algorithm": ASGD("sum"), "timeouts": Timeouts(silence_s=SILENCE_S)}
    strategy = ASGDStrategy(NSYNC, island=inside_of(inside, size), **run)
    module = Counts(sharded=inside == "fsdp2", size=size)
    fit(module, numbers(SAMPLES, BATCH), devices=size, strategy=strategy, callbacks=[report])


if __name__ == "__main__":
    main()
