"""Small modules, data and callbacks for tests that run a real Trainer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    """A linear target, a small network with batch norm, SGD with momentum and a step-wise schedule."""

    def __init__(self, width: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def dataset(n: int = 256, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, x[:, :1] * 2 - x[:, 1:2] + 0.5)


def loader(n: int = 256, batch_size: int = 8, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(dataset(n), batch_size=batch_size, shuffle=shuffle)


def trainer(tmp_path: Path, strategy: Any, *, devices: int = 2, **kwargs: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": str(tmp_path),
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **kwargs})


def digest(module: nn.Module) -> str:
    """Equal for two modules exactly if all their parameters and buffers are, bit for bit."""
    total = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


class Recorder(pl.Callback):
    """Writes what each rank saw at its sync points to ``<folder>/rank<r>.json``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[Any] = []

    def note(self, trainer: Any, module: Any, what: str) -> None:
        self.seen.append(
            {
                "what": what,
                "digest": digest(module),
                "initialized": torch.distributed.is_initialized(),
                "step": trainer.global_step,
                "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
                "stats": {k: v for k, v in trainer.strategy.stats.summary().items() if k != "histogram"},
            }
        )
        file = self.folder / f"rank{trainer.global_rank}.json"
        written = file.with_suffix(".new")
        written.write_text(json.dumps(self.seen))
        written.rename(file)  # somebody may be reading it

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module, "fit start")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module, "epoch end")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module, "validation end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer, pl_module, "train end")

    @staticmethod
    def read(folder: Path, rank: int) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = json.loads((folder / f"rank{rank}.json").read_text())
        return records
