"""What a case of the battery has at hand: a Trainer of one of the trees, small modules and data, and a witness."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

WORKERS = 2
SAMPLES, BATCH = 512, 8
VARIANCE = 5.0  # of the regression's target: the loss of a module that has learnt nothing
STEPS = SAMPLES // BATCH // WORKERS  # per epoch and worker


@dataclass
class Record:
    """What a rank saw at a sync point."""

    event: str
    epoch: int
    step: int
    digest: str
    metrics: dict[str, float]


@dataclass
class Lab:
    """Made anew for every case and rank.

    Args:
        pl: ``pytorch_lightning`` or ``lightning.pytorch``.
        make_strategy: a new strategy for every Trainer.
        folder: empty, the same for all ranks.
        rank: of this process.
        asynchronous: whether it is the case's turn under A-SGD.
        workers: number of processes.
    """

    pl: Any
    make_strategy: Callable[..., Any]
    folder: Path
    rank: int
    asynchronous: bool = False
    workers: int = WORKERS
    records: list[Record] = field(default_factory=list)

    def trainer(self, *, callbacks: Any = (), strategy: Any = None, ddp: Any = None, **options: Any) -> Any:
        """A Trainer for all workers on the CPU, quiet and with a witness.

        Args:
            callbacks: beside the witness.
            strategy: in place of the case's own.
            ddp: options that DDP alone needs.
            **options: of the Trainer; ``...`` takes Lightning's default instead of this method's.
        """
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": self.workers,
            "max_epochs": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(c, self.pl.callbacks.Checkpoint) for c in callbacks),
            "num_sanity_val_steps": 0,
            "default_root_dir": str(self.folder),
        }
        for key in [key for key, value in options.items() if value is ...]:
            defaults.pop(key)
            options.pop(key)
        return self.pl.Trainer(
            strategy=strategy or self.make_strategy(**(ddp or {})),
            callbacks=[*callbacks, self.witness()],
            **{**defaults, **options},
        )

    def fit(self, module: Any = None, **options: Any) -> Any:
        """Fit the regression, or another module with its data, and validate after every epoch.

        Returns:
            the Trainer.
        """
        trainer = self.trainer(**options)
        trainer.fit(module if module is not None else self.regression(), self.loader(), self.loader(64, seed=1))
        return trainer

    def regression(self, override: type = object, **attributes: Any) -> Any:
        """A small network for a linear target: SGD with momentum, validation loss over all workers.

        Args:
            override: its methods replace the module's.
            **attributes: set on the module.
        """
        torch.manual_seed(7)
        base = regression_class(self.pl)
        cls = base if override is object else type(override.__name__, (override, base), {})
        return cls(**attributes)

    def loader(self, n: int = SAMPLES, seed: int = 0, batch_size: int = BATCH, **options: Any) -> DataLoader[Any]:
        """Batches of the regression's data."""
        return DataLoader(dataset(n, seed), batch_size=batch_size, **options)

    def witness(self) -> Any:
        """A callback that writes down what this rank sees at sync points."""
        lab = self

        class Witness(self.pl.Callback):
            def note(self, trainer: Any, module: Any, event: str) -> None:
                metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
                lab.records.append(Record(event, trainer.current_epoch, trainer.global_step, digest(module), metrics))

            def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
                self.note(trainer, pl_module, "fit start")

            def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
                self.note(trainer, pl_module, "validation end")

            def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
                self.note(trainer, pl_module, "epoch end")

            def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
                self.note(trainer, pl_module, "fit end")

            def on_test_end(self, trainer: Any, pl_module: Any) -> None:
                self.note(trainer, pl_module, "test end")

            def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
                self.note(trainer, pl_module, "predict end")

        return Witness()

    def files(self, pattern: str = "**/*.ckpt") -> list[str]:
        """Names of the files that were written, below the case's folder."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob(pattern))


def dataset(n: int = SAMPLES, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, 2 * x[:, :1] - x[:, 1:2] + 0.5)


class Stream(IterableDataset[Any]):
    """The regression's data as a stream; every worker takes the batches of its own."""

    def __init__(self, rank: int, n: int = SAMPLES) -> None:
        self.rank, self.n = rank, n

    def __iter__(self) -> Iterator[Any]:
        data = dataset(self.n)
        yield from (data[i] for i in range(self.rank, self.n, WORKERS))


def loss_of(module: Any, n: int = SAMPLES) -> float:
    """The regression's loss over the whole training set, in this process."""
    module = copy.deepcopy(module).eval()
    if len({p.dtype for p in module.parameters()}) == 1:
        module.float()
    x, y = dataset(n).tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(module(x), y))


def digest(module: nn.Module) -> str:
    """Equal for two modules exactly if all their parameters and buffers are, bit for bit."""
    total = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if isinstance(tensor, Tensor):
            total.update(name.encode())
            total.update(
                tensor.detach().cpu().to_dense().clone().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return total.hexdigest()


@functools.cache
def regression_class(pl: Any) -> Any:
    """The regression as a class of ``pl``'s."""

    class Regression(pl.LightningModule):  # type: ignore[misc, name-defined]
        lr = 0.03

        def __init__(self, **attributes: Any) -> None:
            super().__init__()
            self.build()
            for name, value in attributes.items():
                setattr(self, name, value)

        def build(self) -> None:
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self(x).float(), y.float())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)
            self.log("progress", -1.0 * self.current_epoch, sync_dist=True)  # decisions that depend on nothing else

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)

    return Regression
