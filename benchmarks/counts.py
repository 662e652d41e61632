"""A program whose outcome says which samples were lost or trained twice."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

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


class Diary(pl.Callback):
    """Writes into a file, which others read meanwhile, what they want to know of a worker."""

    def __init__(self, file: Path, **told: Any) -> None:
        self.file = file
        self.told: dict[str, Any] = told

    def tell(self, **about: Any) -> None:
        """Add to what the file holds."""
        self.told.update(about)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.told))
        new.rename(self.file)
