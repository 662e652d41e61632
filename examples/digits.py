"""The task of the examples and benchmarks: handwritten digits, 8x8 pixels, which come with scikit-learn.

Nothing here is specific to A-SGD: you have code like this already.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class DigitsCNN(LightningModule):
    """Two convolutions and two linear layers, trained with SGD.

    Args:
        width: channels of the first convolution; the parameters grow with its cube
            (16: 72 thousand, 32: 0.28 million, 64: 1.1 million, 128: 4.5 million).
        lr: learning rate.
        momentum: momentum of SGD.
    """

    def __init__(self, width: int = 16, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__()
        self.lr = lr
        self.momentum = momentum
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 8 * width),
            nn.ReLU(),
            nn.Linear(8 * width, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        accuracy = (self.net(x).argmax(1) == y).float().mean()
        self.log("val_acc", accuracy, prog_bar=True, sync_dist=True, batch_size=len(y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def datasets(fold: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """The same 1437 images for training and 360 for validation, always; each image validates one of five folds."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).roll(fold * 360)
    train, val = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[val], y[val])


def loaders(batch_size: int = 16, fold: int = 0) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders for training and for validation; ``batch_size`` is that of one worker. There are five folds."""
    train, val = datasets(fold)
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, 90)


class Meter(Callback):
    """What the examples show of a run, over all workers. Complete, and equal on all of them, when ``fit`` returns.

    Training time is all time but that of validation and of the first ``skip`` batches. Under A-SGD it includes the
    wait for slower workers at the end of an epoch.

    Attributes:
        accuracy: validation accuracy after each epoch.
        seconds: of training until then, from the first batch that counts.
        samples_per_s: training samples per second: the sum of the workers' rates.
        exchanges: exchanges with the servers; 0 without A-SGD.
        staleness: how many pushes were 0, 1, 2, ... versions stale.
    """

    def __init__(self, skip: int = 20) -> None:
        self.skip = skip
        self.accuracy: list[float] = []
        self.seconds: list[float] = []
        self.samples_per_s = 0.0
        self.exchanges = 0
        self.staleness: list[int] = []
        self._batches = self._samples = 0
        self._seconds = 0.0
        self._since: float | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._since = time.perf_counter() if self._batches >= self.skip else None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if self._since is not None:
            self._samples += len(batch[0])
        elif self._batches >= self.skip:
            self._since = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.accuracy.append(trainer.callback_metrics["val_acc"].item())
            self.seconds.append(self._seconds)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        def total(values: list[float]) -> list[float]:
            return trainer.strategy.reduce(torch.tensor(values, dtype=torch.float64), reduce_op="sum").tolist()

        stats = getattr(trainer.strategy, "stats", None)  # A-SGD's, of this worker
        histogram = stats.staleness_histogram if stats else {}
        (self.samples_per_s,) = total([self._samples / self._seconds if self._seconds else 0.0])
        (exchanges,) = total([stats.exchanges if stats else 0])
        self.exchanges = int(exchanges)
        staleness = [int(n) for n in total([histogram.get(s, 0) for s in range(100)])]
        while staleness and not staleness[-1]:
            staleness.pop()
        self.staleness = staleness

    def results(self) -> dict[str, Any]:
        """All attributes as plain values."""
        return {
            name: getattr(self, name) for name in ("accuracy", "seconds", "samples_per_s", "exchanges", "staleness")
        }
