"""A LightningCLI program: a YAML file makes all choices, including the strategy.

    python examples/cli/main.py fit --config examples/cli/configs/asgd.yaml
    python examples/cli/main.py fit --config examples/cli/configs/asgd.yaml --trainer.strategy.init_args.nsync 5

Nothing in the program is specific to A-SGD. See README.md in this folder.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


class Digits(LightningDataModule):
    """Handwritten digits, 8 x 8 pixels, which come with scikit-learn.

    Args:
        batch_size: of one worker.
    """

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
        self.train, self.val = random_split(data, [1437, 360], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, 90)


class Classifier(LightningModule):
    """Two layers. The optimizer is chosen in the configuration.

    Args:
        width: of the hidden layer.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy, prog_bar=True)


if __name__ == "__main__":
    LightningCLI(Classifier, Digits, seed_everything_default=1)
