"""The README, followed line by line with three programs of users' own, in an empty environment that has only the wheel.

    python -m benchmarks.newcomer_readme
    python -m benchmarks.newcomer_readme --only text      # one of image, text, cli

The programs are written for DDP: images with batch norm, a schedule and a torchmetric; text with AdamW, clipping, early
stopping, two checkpoints and a CSV log; the third one is a LightningCLI. README's diff is applied to them, and each
runs under both Lightnings. A run fails if it ends with an error, prints a traceback or a warning of this package's, or
lacks a line that README says one sees.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.helpers import pages

CONSOLE = Console(highlight=False)
README = (pages.ROOT / "README.md").read_text()
LIMIT_S = 300.0

IMAGE = """
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
            nn.Linear(128, 4),
        )
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch, i):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, i):
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("val_acc", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


if __name__ == "__main__":
    torch.manual_seed(0)
    y = torch.arange(2048) % 4
    x = torch.randn(2048, 1, 12, 12) * 0.3
    for i in range(4):
        x[y == i, :, 3 * i : 3 * i + 3] += 1
    train, val = TensorDataset(x[:1536], y[:1536]), TensorDataset(x[1536:], y[1536:])
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3)
    trainer.fit(Net(), DataLoader(train, 32, shuffle=True), DataLoader(val, 64))
    print(f"accuracy {trainer.callback_metrics['val_acc']:.3f}")
    assert trainer.callback_metrics["val_acc"] > 0.9
"""

TEXT = """
import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Characters(Dataset):
    def __init__(self, text, length=32):
        self.codes, self.length = torch.tensor([ord(c) % 96 for c in text]), length

    def __len__(self):
        return len(self.codes) // self.length - 1

    def __getitem__(self, i):
        piece = self.codes[i * self.length : (i + 1) * self.length + 1]
        return {"input_ids": piece[:-1], "labels": piece[1:]}


class Model(LightningModule):
    def __init__(self, width=32, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(96, width)
        self.net = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 96)
        self.head.weight = self.embed.weight

    def step(self, batch, name):
        logits = self.head(self.net(self.embed(batch["input_ids"]))[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log(f"{name}_loss", loss, on_step=name == "train", on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=0.1)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    seed_everything(1, workers=True)
    text = open(torch.__file__, encoding="utf8").read()[:60000]
    callbacks = [
        EarlyStopping("val_loss", patience=2),
        ModelCheckpoint(monitor="val_loss", filename="best"),
        ModelCheckpoint(filename="last", save_last=True),
        LearningRateMonitor("step"),
    ]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=callbacks,
        logger=CSVLogger("logs"),
        log_every_n_steps=5,
    )
    train, val = Characters(text[:50000]), Characters(text[50000:])
    trainer.fit(Model(), DataLoader(train, 16, shuffle=True), DataLoader(val, 16))
    if trainer.is_global_zero:
        best = Model.load_from_checkpoint(callbacks[1].best_model_path)
        print(f"best {float(callbacks[1].best_model_score):.3f}, width {best.hparams.width}")


if __name__ == "__main__":
    main()
"""

CLI = """
import torch
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

if __name__ == "__main__":
    LightningCLI(BoringModel, BoringDataModule, seed_everything_default=7)
"""
CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 2
  strategy: ddp
  enable_progress_bar: false
"""
PROGRAMS = {"image": (IMAGE, "python train.py"), "text": (TEXT, "python train.py")}
PROGRAMS["cli"] = (CLI, "python train.py fit --config config.yaml")


def said_by_readme() -> tuple[list[str], str, str, list[str]]:
    """The commands that install, the import and the argument of the diff, and the lines that one should see."""
    install, shown = (re.findall(rf"```\n({begin}.*?)```", README, re.DOTALL)[0] for begin in ("pip", "Transport"))
    (imported,) = re.findall(r"^\+(from lightning_asgd .*)$", README, re.MULTILINE)
    (argument,) = re.findall(r"^\+trainer = .*(strategy=\S+\(\))\)$", README, re.MULTILINE)
    return [line.split(" #")[0] for line in install.splitlines()], imported, argument, shown.splitlines()


def environment(folder: Path, commands: list[str]) -> dict[str, str]:
    """An empty virtual environment, with what README installs: the wheel takes the checkout's place."""
    wheels, venv = folder / "wheels", folder / "venv"
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(pages.ROOT)]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    active = {**os.environ, "VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:{os.environ['PATH']}"}
    active.pop("PYTHONPATH", None)
    # What the programs need, and the other Lightning: not README's business.
    for command in (*commands, "pip install lightning 'jsonargparse[signatures]' rich"):
        command = command.replace("pip install", "pip install -q").replace("'.[", f"'{wheel}[")
        subprocess.run(["bash", "-ec", command], cwd=folder, env=active, check=True)
    return active


def follow(folder: Path, active: dict[str, str], name: str, package: str) -> str | None:
    """Run a program with README's change; None, or what is wrong."""
    _, imported, argument, expected = said_by_readme()
    program, command = PROGRAMS[name]
    folder.mkdir()
    program = program.replace("pytorch_lightning", package).replace('strategy="ddp"', argument)
    (folder / "train.py").write_text(f"{imported}\n{program}")
    (folder / "config.yaml").write_text(
        CONFIG.replace("strategy: ddp", "strategy: {class_path: lightning_asgd.ASGDStrategy}")
    )
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=active, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    said = done.stdout + done.stderr
    if done.returncode != 0 or "Traceback" in said:
        return f"It ended with {done.returncode}:\n{said[-3000:]}"
    if found := re.findall(r"^.*lightning_asgd.*Warning.*$", said, re.MULTILINE):
        return f"It warns: {found}"
    patterns = [re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(line.removesuffix("..."))) for line in expected]
    missing = [line for line, pattern in zip(expected, patterns, strict=True) if not re.search(pattern, said)]
    return f"README's lines {missing} are missing:\n{said[-3000:]}" if missing else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PROGRAMS))
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="readme-") as place:
        folder = Path(place)
        active = environment(folder, said_by_readme()[0])
        for name in [args.only] if args.only else PROGRAMS:
            for package in ("pytorch_lightning", "lightning.pytorch"):
                begun = time.monotonic()
                wrong = follow(folder / f"{name}-{package}", active, name, package)
                failed += wrong is not None
                took = f"{time.monotonic() - begun:.0f} s"
                CONSOLE.print(f"{name} with {package}: {'as README says' if wrong is None else wrong}, {took}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
