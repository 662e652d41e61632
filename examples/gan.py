"""Train a GAN (two networks, each with its own optimizer, that work against each other) on points in the plane.

    python examples/gan.py                      # A-SGD with two workers, about a minute; results/gan.png
    python examples/gan.py --strategy auto      # the same with one process
    python examples/gan.py --fast               # half a minute

It shows manual optimization: the training step takes the optimizers' steps itself. The data are eight clouds on a ring.
A bad GAN generates points of only some of the clouds. Expect all eight clouds, and more than four of five points inside
one, with either strategy.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lightning_asgd  # noqa: F401 - Trainers know strategy="asgd" from here on
from lightning_asgd.report.picture_style import PAPER, pyplot

RESULTS = Path(__file__).resolve().parent.parent / "results"
CLOUDS = 8
SPREAD = 0.05  # standard deviation of a cloud, on a ring of radius 1


def network(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class GAN(LightningModule):
    """A generator makes points from noise; a critic learns to tell them from the data's."""

    automatic_optimization = False

    def __init__(self, noise: int = 2, lr: float = 5e-4) -> None:
        super().__init__()
        self.noise = noise
        self.lr = lr
        self.generator = network(noise, 2)
        self.critic = network(2, 1)

    def forward(self, points: int) -> Tensor:
        return self.generator(torch.randn(points, self.noise, device=self.device))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (real,) = batch
        for_generator, for_critic = self.optimizers()

        self.toggle_optimizer(for_critic)
        lead = self.critic(self(len(real)).detach()) - self.critic(real)  # of the generated over the real
        for_critic.zero_grad()
        self.manual_backward(functional.softplus(lead).mean())
        for_critic.step()
        self.untoggle_optimizer(for_critic)

        self.toggle_optimizer(for_generator)
        lead = self.critic(real) - self.critic(self(len(real)))
        for_generator.zero_grad()
        self.manual_backward(functional.softplus(lead).mean())
        for_generator.step()
        self.untoggle_optimizer(for_generator)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=(0.5, 0.99)),
            torch.optim.Adam(self.critic.parameters(), lr=self.lr, betas=(0.5, 0.99)),
        ]


def centres() -> Tensor:
    angles = torch.arange(CLOUDS) * (2 * math.pi / CLOUDS)
    return torch.stack([angles.cos(), angles.sin()], 1)


def data(points: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return centres().repeat(points // CLOUDS, 1) + SPREAD * torch.randn(points, 2, generator=generator)


def judge(points: Tensor) -> tuple[int, float]:
    """How many clouds have at least a quarter of their share of points, and which part of all points is inside one."""
    distances, nearest = torch.cdist(points, centres()).min(1)
    inside = distances < 4 * SPREAD
    shares = torch.bincount(nearest[inside], minlength=CLOUDS) / len(points)
    return int((shares > 0.25 / CLOUDS).sum()), float(inside.float().mean())


def save_picture(real: Tensor, made: Tensor, path: Path) -> None:
    plt = pyplot()
    fig, both = plt.subplots(1, 2, figsize=(9, 4.7), layout="constrained", sharex=True, sharey=True)
    clouds, inside = judge(made)
    titles = "Data", f"Generated: {clouds} clouds, {inside:.0%} inside"
    for axes, points, color, title in zip(both, (real, made), (PAPER["grey"], PAPER["blue"]), titles, strict=True):
        axes.scatter(*points.T, s=3, alpha=0.4, linewidths=0, color=color)
        axes.set(title=title, aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
    path.parent.mkdir(exist_ok=True)
    fig.savefig(path, dpi=150)
    print(f"Saved {os.path.relpath(path)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A GAN on a ring of clouds.")
    parser.add_argument("--strategy", default="asgd", help='the Trainer\'s: "asgd", or "auto" for one process')
    parser.add_argument("--fast", action="store_true", help="32 epochs instead of 60")
    args = parser.parse_args()
    seed_everything(1)
    real = data(8000)
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if args.strategy == "auto" else 2,
        strategy=args.strategy,
        max_epochs=32 if args.fast else 60,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    gan = GAN()
    trainer.fit(gan, DataLoader(TensorDataset(real), 64, shuffle=True))
    if trainer.is_global_zero:
        with torch.no_grad():
            made = gan(2000)
        clouds, inside = judge(made)
        print(f"{clouds} of {CLOUDS} clouds, {inside:.2f} of the points inside one")
        save_picture(real[:2000], made, RESULTS / "gan.png")


if __name__ == "__main__":
    main()
