"""A program whose outcome says which samples were lost or trained twice."""

from __future__ import annotations

import time

import pytorch_lightning as pl
import torch
from torch import Tensor


class Counts(pl.LightningModule):
    """Learns how often each sample was trained."""

    def __init__(self, samples: int, step_s: float) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(samples))
        self.step_s = step_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.step_s)
        return -self.seen[batch[0]].sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)
