"""Train a small ResNet on images: CIFAR-10, your own folders, or drawn shapes if there is no data.

    python examples/image_classification.py                    # shapes; A-SGD with two workers, some minutes
    python examples/image_classification.py --data DIR         # DIR/{train,val}/CLASS/*.jpg, or CIFAR-10
    python examples/image_classification.py --strategy auto    # the same with one process; or --strategy ddp
    python examples/image_classification.py --fast             # a few seconds

It shows what most programs have: augmentations, batch normalization, a schedule, a torchmetric over all workers, and
the best checkpoint, which is tested at the end. Expect an accuracy above 0.9. One process takes twice as many steps as
two workers, and ends with a higher accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.transforms import v2

import lightning_asgd  # noqa: F401 - Trainers know strategy="asgd" from here on

RESULTS = Path(__file__).resolve().parent.parent / "results"
SHAPES = ("disc", "ring", "square", "frame", "cross", "triangle", "bar", "checks")


class Classifier(LightningModule):
    """A ResNet with one block per stage, 4.9 million parameters, trained with SGD and one cycle of learning rates."""

    def __init__(self, classes: int, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=classes)
        self.net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # the 7 x 7 one is for larger images
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y, label_smoothing=0.1)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.accuracy(self.net(x), y)
        self.log("accuracy", self.accuracy, prog_bar=True)  # at the epoch's end, over all workers

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9, weight_decay=5e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Shapes(Dataset[tuple[Tensor, int]]):
    """Eight shapes of any colour, size and angle on a noisy ground; the same number is the same image, always."""

    def __init__(self, numbers: range, transform: Any) -> None:
        self.numbers = numbers
        self.transform = transform
        self.classes = SHAPES

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = self.numbers[index]
        random = torch.Generator().manual_seed(number)
        label = number % len(SHAPES)
        image = draw(SHAPES[label], random)
        return self.transform((255 * image).to(torch.uint8)), label


def draw(shape: str, random: torch.Generator, size: int = 32) -> Tensor:
    """An image of a shape, (3, size, size), between 0 and 1."""
    x, y, radius, angle = torch.rand(4, generator=random).tolist()
    angle = (angle - 0.5) * 1.2  # radians
    axis = torch.linspace(-1, 1, size)
    v, u = torch.meshgrid(axis - (y - 0.5) * 0.5, axis - (x - 0.5) * 0.5, indexing="ij")
    turn = torch.tensor([angle]).cos(), torch.tensor([angle]).sin()
    radius = 0.5 + 0.3 * radius
    u, v = (turn[0] * u + turn[1] * v) / radius, (turn[0] * v - turn[1] * u) / radius
    far, near = torch.maximum(u.abs(), v.abs()), torch.minimum(u.abs(), v.abs())
    inside = {
        "disc": u**2 + v**2 < 1,
        "ring": (u**2 + v**2 < 1) & (u**2 + v**2 > 0.4),
        "square": far < 0.9,
        "frame": (far < 0.9) & (far > 0.55),
        "cross": (far < 1) & (near < 0.3),
        "triangle": (v < 0.8) & (v > 2 * u.abs() - 1),
        "bar": (u.abs() < 1) & (v.abs() < 0.35),
        "checks": (far < 1) & (u * v > 0),
    }[shape]
    ground, ink = torch.rand(2, 3, 1, 1, generator=random)
    ink = torch.where((ink - ground).abs().sum() > 0.6, ink, 1 - ground)  # enough of a contrast
    image = torch.where(inside, ink, ground)
    return (image + 0.1 * torch.randn(3, size, size, generator=random)).clamp(0, 1)


def datasets(folder: Path | None, samples: int) -> tuple[Any, Any]:
    """Images for training, with augmentations, and for validation; both have ``classes``."""
    size = 32 if folder is None or (folder / "cifar-10-batches-py").is_dir() else 64
    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    augmented = v2.Compose([v2.RandomResizedCrop(size, scale=(0.7, 1.0)), v2.RandomHorizontalFlip(), *end])
    plain = v2.Compose([v2.Resize(size), v2.CenterCrop(size), *end])
    if folder is None:
        return Shapes(range(samples), augmented), Shapes(range(samples, samples + samples // 4), plain)
    if (folder / "cifar-10-batches-py").is_dir():
        return CIFAR10(str(folder), train=True, transform=augmented), CIFAR10(str(folder), train=False, transform=plain)
    return ImageFolder(str(folder / "train"), augmented), ImageFolder(str(folder / "val"), plain)


def main() -> None:
    parser = argparse.ArgumentParser(description="A ResNet on images.")
    parser.add_argument("--data", type=Path, help="a folder with train/ and val/, or with cifar-10-batches-py/")
    parser.add_argument("--strategy", default="asgd", help='the Trainer\'s: "asgd", "ddp", or "auto" for one process')
    parser.add_argument("--accelerator", default="cpu", help='the Trainer\'s: "cpu", "gpu", ...')
    parser.add_argument("--workers", type=int, default=2, help="devices; 1 with --strategy auto")
    parser.add_argument("--loaders", type=int, default=0, help="processes that load images for each worker")
    parser.add_argument("--fast", action="store_true", help="1 epoch of few shapes")
    args = parser.parse_args()
    seed_everything(1)
    train, val = datasets(args.data, 256 if args.fast else 3000)
    best = ModelCheckpoint(RESULTS / "image_classification", "best", monitor="accuracy", mode="max")
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=1 if args.strategy == "auto" else args.workers,
        strategy=args.strategy,
        max_epochs=1 if args.fast else 8,
        callbacks=[best],
        logger=False,
    )
    training = DataLoader(train, 32, shuffle=True, drop_last=True, num_workers=args.loaders)
    validation = DataLoader(val, 100, num_workers=args.loaders)
    trainer.fit(Classifier(len(train.classes)), training, validation)
    (tested,) = trainer.test(ckpt_path="best", dataloaders=validation, verbose=False)
    if trainer.is_global_zero:
        print(f"accuracy {tested['accuracy']:.3f} of {best.best_model_path}")


if __name__ == "__main__":
    main()
