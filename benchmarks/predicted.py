"""What `lightning-asgd plan` predicts of a step's time and memory, beside what torch measures.

    python benchmarks/predicted.py     # about two minutes on one core

Three modules: torchvision's ResNet-18 on images of 64 pixels, blocks of wide linear layers, and a Transformer encoder.
Each is measured as it is, then planned for less and less memory: 80 %, 60 % and 40 % of the way from what it needs at
least to what it needs as it is. The plan's layers are then recomputed for real. Measured memory is the sum of what
torch's profiler sees allocated at its highest, and of the weights, gradients and optimizer state that were there.

The goal: predictions within 15 %.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from common import CONSOLE
from pytorch_lightning import LightningModule
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_asgd.plan.layer_profile import profile_step, recompute
from lightning_asgd.plan.mini_batch import RECOMPUTED, choose_ways
from lightning_asgd.plan.timing import TrainingStep, seconds_per_step

GOAL = 0.15
SHARES = (1.0, 0.8, 0.6, 0.4)


class Classifier(LightningModule):
    """Any network with a mean of squares as its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def resnet() -> LightningModule:
    import torchvision

    return Classifier(torchvision.models.resnet18(num_classes=10))


def linear_blocks() -> LightningModule:
    blocks = [nn.Sequential(nn.Linear(128, 2048), nn.GELU(), nn.Linear(2048, 128)) for _ in range(8)]
    return Classifier(nn.Sequential(*blocks))


def transformer() -> LightningModule:
    layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(6)]
    return Classifier(nn.Sequential(nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])))


MODULES: dict[str, tuple[Callable[[], LightningModule], Callable[[], Tensor]]] = {
    "ResNet-18, 64 images": (resnet, lambda: torch.randn(64, 3, 64, 64)),
    "linear blocks, 2,048 rows": (linear_blocks, lambda: torch.randn(2048, 128)),
    "Transformer, 32 x 128 tokens": (transformer, lambda: torch.randn(32, 128, 128)),
}


def peak_bytes(step: TrainingStep, batch: Any) -> int:
    """What a step needs at its highest, by torch's profiler, with what was there before."""
    before = step.state_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(batch)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return before + highest


def main() -> int:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    table = Table(title="Predicted and measured", title_justify="left")
    for heading in ("", "recomputed", "MB predicted", "measured", "", "ms predicted", "measured", ""):
        table.add_column(heading, justify="right" if heading else "left")
    good = True
    for name, (make, make_batch) in MODULES.items():
        torch.manual_seed(0)
        module, batch = make(), make_batch()
        found = profile_step(TrainingStep(copy.deepcopy(module), cpu), batch)
        most = choose_ways(found, float("inf"))
        assert most is not None
        least = found.fixed + max(way.workspace for ways in found.layers.values() for way in ways)
        for share in SHARES:
            choice = choose_ways(found, least + share * (most.memory - least))
            if choice is None:
                table.add_row(name, "does not fit", *[""] * 6)
                continue
            planned = copy.deepcopy(module)
            recompute(planned, choice.named(RECOMPUTED))
            step = TrainingStep(planned, cpu)
            seconds = seconds_per_step(step, batch)
            memory = peak_bytes(step, batch)
            errors = [choice.memory / memory - 1, choice.seconds / seconds - 1]
            good &= all(abs(error) <= GOAL for error in errors)
            table.add_row(
                name,
                f"{len(choice.named(RECOMPUTED))} of {len(choice.ways)}",
                *(f"{choice.memory / 1e6:.0f}", f"{memory / 1e6:.0f}", f"{errors[0]:+.0%}"),
                *(f"{1e3 * choice.seconds:.0f}", f"{1e3 * seconds:.0f}", f"{errors[1]:+.0%}"),
            )
    CONSOLE.print(table)
    CONSOLE.print(f"{'[green]PASS' if good else '[red]FAIL'}[/]  predictions within {GOAL:.0%}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
