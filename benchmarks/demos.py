"""Third-party programs, unchanged except for the strategy, trained to the loss that DDP reaches.

* ``LightningTransformer`` and ``LightningLSTM`` from ``pytorch_lightning.demos``, with their own data loaders. Instead
of Wikipedia's text they get the text of Python's standard library. * torchvision's ResNet-18 as a classifier of
scikit-learn's digits.

Every program is trained by two workers under DDP and under A-SGD from the same seeds with the same hyper-parameters;
what counts is the loss of the trained weights over the training data, in one process. A-SGD's loss must differ from
DDP's by at most 5 % of DDP's improvement.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import statistics
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # one thread per worker, and forks that do not hang

import pytorch_lightning as pl
import torch
from common import CONSOLE
from counts import fit
from pytorch_lightning.demos.lstm import LightningLSTM
from pytorch_lightning.demos.transformer import LightningTransformer, WikiText2
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy

MARGIN = 0.05
WORDS = 10_000


@dataclass(frozen=True)
class Program:
    """A module, its data, and the Trainer options it was written for."""

    name: str
    make: Callable[[], Any]
    loss: Callable[[Any], float]
    epochs: int
    loader: Callable[[], Any] | None = None
    options: dict[str, Any] | None = None


def write_text(folder: Path) -> None:
    """Put words of the standard library where the demos look for Wikipedia's."""
    modules = (argparse, contextlib, inspect, textwrap, statistics, warnings)
    words = " ".join(" ".join(inspect.getsource(module).split()) for module in modules).split()[:WORDS]
    lines = [" ".join(words[i : i + 20]) for i in range(0, len(words), 20)]
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines))


def text_loss(module: Any, *, batch: int = 32) -> float:
    """Mean negative log-likelihood per word over the text."""
    module.eval()
    module.hidden = None
    total = count = 0.0
    for inputs, target in DataLoader(WikiText2(download=False), batch_size=batch, drop_last=True):
        if isinstance(module, LightningLSTM):
            output, _ = module.model(inputs, module.model.init_hidden(len(inputs)))
        else:
            output = module(inputs, target)
        total += float(nn.functional.nll_loss(output, target.view(-1))) * target.numel()
        count += target.numel()
    return total / count


class Classifier(pl.LightningModule):
    """A torchvision model, trained as its documentation does: cross entropy, SGD with momentum."""

    def __init__(self) -> None:
        super().__init__()
        import torchvision

        self.model = torchvision.models.resnet18(num_classes=10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def digits() -> TensorDataset:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    images = nn.functional.interpolate(images, scale_factor=4).expand(-1, 3, -1, -1)
    return TensorDataset(images, torch.tensor(data.target))


def digits_loss(module: Any) -> float:
    module.eval()
    images, labels = digits().tensors
    losses = [
        nn.functional.cross_entropy(module.model(x), y, reduction="sum")
        for x, y in zip(images.split(128), labels.split(128), strict=True)
    ]
    return float(sum(losses)) / len(labels)


def programs() -> list[Program]:
    vocabulary = WikiText2(download=False).vocab_size
    return [
        Program("LightningTransformer", lambda: LightningTransformer(vocabulary), text_loss, 4),
        Program(
            "LightningLSTM",
            lambda: LightningLSTM(vocabulary),
            text_loss,
            6,
            # its batch sampler is its own: every worker sees the whole text, under both strategies
            options={"gradient_clip_val": 0.25, "use_distributed_sampler": False},
        ),
        Program(
            "torchvision resnet18",
            Classifier,
            digits_loss,
            4,  # after two, DDP's own loss is anything from 0.1 to 0.4
            lambda: DataLoader(digits(), batch_size=16, shuffle=True),
        ),
    ]


def train(program: Program, strategy: Any, seed: int, folder: Path) -> float:
    """Train with two workers.

    Returns:
        the loss of the trained weights over the training data.
    """
    pl.seed_everything(seed, verbose=False)
    module = program.make()
    options = {"devices": 2, "max_epochs": program.epochs, "default_root_dir": folder, **(program.options or {})}
    fit(module, (program.loader() if program.loader else None,), strategy=strategy, **options)
    with torch.no_grad():
        return program.loss(module)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--nsync", type=int, default=10)
    parser.add_argument("--only", help="part of a program's name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    table = Table(title=f"Loss over the training data, 2 workers, seeds {args.seeds}", title_justify="left")
    for heading in ("program", "untrained", "DDP", "A-SGD", "A-SGD min - max", ""):
        table.add_column(heading, justify="left" if heading == "program" else "right")
    good = True
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        os.chdir(folder)  # the demos look for ./data
        try:
            for program in programs():
                if args.only and args.only not in program.name:
                    continue
                pl.seed_everything(args.seeds[0], verbose=False)
                with torch.no_grad():
                    untrained = program.loss(program.make())
                ddp, ours = [], []
                for seed in args.seeds:
                    ddp.append(train(program, "ddp_fork", seed, folder))
                    ours.append(train(program, ASGDStrategy(nsync=args.nsync, start_method="fork"), seed, folder))
                    CONSOLE.print(f"{program.name}, seed {seed}: DDP {ddp[-1]:.3f}, A-SGD {ours[-1]:.3f}")
                median, base = statistics.median(ours), statistics.median(ddp)
                fine = median <= base + MARGIN * (untrained - base)
                good &= fine
                spread = f"{min(ours):.3f} - {max(ours):.3f}"
                row = (f"{untrained:.3f}", f"{base:.3f}", f"{median:.3f}", spread, "PASS" if fine else "FAIL")
                table.add_row(program.name, *row)
        finally:
            os.chdir(before)
    CONSOLE.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
