"""What :mod:`rules` and :mod:`codes` train: digits, Fashion-MNIST and a character transformer."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accuracy import CNN, TESTED, digest, missing_images, read
from islands_parts import PROBLEMS, SGD, Problem
from islands_program import Task, loss_of
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["SETS", "Learner", "checksum", "measured", "missing", "version"]

FASHION = 10_000  # training images
AT_ONCE = 500  # held-out samples


@cache
def fashion() -> tuple[Any, Any]:
    """The first training images, and all test images."""
    return read("train", FASHION), read("t10k", TESTED)


_digits, _text = PROBLEMS
SETS = {
    "digits": replace(_digits, data=cache(_digits.data), batch=16, epochs=40),
    "fashion": Problem("Fashion-MNIST", fashion, lambda: [*CNN("SGD").net], SGD, 32, 8, 0.01, rising=True),
    "text": replace(_text, epochs=5),
}


def missing(name: str) -> str | None:
    """Why a set cannot be trained on here, as a sentence; None if it can."""
    return missing_images() if name == "fashion" else None


class Learner(Task):
    """A problem's network, whose learning rate falls in equal steps with every epoch: chance then counts less.

    Args:
        problem: what is trained.
        falling: whether the learning rate falls.
    """

    def __init__(self, problem: Problem, *, falling: bool = True) -> None:
        super().__init__(problem.layers(), problem.optimizer, sharded=False)
        self.falling = falling

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.layers, *batch), batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if not self.falling:
            return optimizer
        epochs = self.trainer.max_epochs
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 1 - epoch / epochs)]


@torch.no_grad()
def measured(module: Learner, held_out: Any) -> dict[str, float]:
    """Loss and accuracy on held-out samples, all of them in this process."""
    layers = module.layers.eval()
    loss = right = total = 0.0
    inputs, targets = held_out[:]
    for x, y in zip(inputs.split(AT_ONCE), targets.split(AT_ONCE), strict=True):
        outputs = layers(x)
        loss += float(functional.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="sum"))
        right += int((outputs.argmax(-1) == y).sum())
        total += y.numel()
    return {"loss": loss / total if math.isfinite(loss) else math.inf, "accuracy": right / total}


def checksum(module: Learner) -> str:
    """Differs if the weights do."""
    return sum(float(parameter.double().sum()) for parameter in module.parameters()).hex()


def version(*, package: bool) -> str:
    """Changes with what a loss depends on: torch, the files of this benchmark, and those of lightning_asgd."""
    found = hashlib.sha256(torch.__version__.encode())
    for name in ("rules_sets.py", "islands_parts.py", "islands_program.py", "plain_loop.py"):
        found.update(Path(__file__).with_name(name).read_bytes())
    return found.hexdigest()[:12] + (digest() if package else "")
