"""Sample networks from a posterior instead of training one: a prediction with its uncertainty.

    python examples/bayesian.py                 # two workers, about a minute; results/bayesian.png
    python examples/bayesian.py --workers 1     # the chain of one process
    python examples/bayesian.py --fast          # a few seconds

It shows SG-MCMC: the optimizer adds noise to every step. The servers add up the changes of the workers' steps, and keep
a copy of the weights now and then; these copies are `strategy.samples`. The data have a gap in the middle. Expect a
band that contains 95 of 100 points or slightly more where there are data, and that widens in the gap.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from lightning_asgd import Advanced, ASGDStrategy, averaged_prediction
from lightning_asgd.algorithms import SGMCMC
from lightning_asgd.optim import SGHMC
from lightning_asgd.report.picture_style import PAPER, pyplot

RESULTS = Path(__file__).resolve().parent.parent / "results"
NOISE = 0.2  # standard deviation of an observation, which the model knows
GAP = -1.0, 1.0  # between which there are no data
LINE = torch.linspace(-3.5, 3.5, 200)  # where the picture shows predictions
NUM_DATA = 128
BATCH = 8
PASSES = 20  # over the data in an epoch: workers meet at its end


class Network(LightningModule):
    """Waves of random length: a function of one number, with a standard normal prior for the weights."""

    def __init__(self, lr: float, width: int = 50) -> None:
        super().__init__()
        self.lr = lr
        self.scale = (2 / width) ** 0.5  # whatever the width, values are about 1 before there are data
        self.waves = nn.Linear(1, width)
        self.sum = nn.Linear(width, 1)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.sum(torch.sin(2 * self.waves(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return ((self(x) - y) ** 2).mean() / (2 * NOISE**2)  # an example's negative log likelihood, but for a constant

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGHMC(self.parameters(), lr=self.lr, num_data=NUM_DATA, friction=0.1, weight_decay=1.0)


def observations(points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy values of a curve, left and right of a gap."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(points, 1, generator=generator)
    x = torch.where(x < 0.5, 3 * x - 2.5, 3 * x - 0.5)  # -2.5 to -1, and 1 to 2.5
    return x, curve(x) + NOISE * torch.randn(points, 1, generator=generator)


def curve(x: Tensor) -> Tensor:
    return torch.sin(2 * x)


def predict(model: nn.Module, samples: list[dict[str, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of an observation at each x, the noise included."""
    mean = averaged_prediction(model, samples, x)
    square = averaged_prediction(model, samples, x, transform=torch.square)
    return mean, (square - mean**2 + NOISE**2).sqrt()


def save_picture(networks: int, mean: Tensor, deviation: Tensor, path: Path) -> None:
    plt = pyplot()
    fig, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    low, high = mean - 2 * deviation, mean + 2 * deviation
    axes.fill_between(LINE, low, high, color=PAPER["blue"], alpha=0.2, lw=0, label="two standard deviations")
    axes.plot(LINE, mean, color=PAPER["blue"], label=f"mean of {networks} networks")
    axes.plot(LINE, curve(LINE), "--", color=PAPER["orange"], label="the curve")
    axes.plot(*(values.flatten() for values in observations(NUM_DATA, 0)), ".", ms=4, color=PAPER["soft"], label="data")
    axes.set(title="Predictions of samples of the posterior", xlabel="x", ylim=(-3, 4))
    axes.legend(loc="upper left", ncols=2)
    fig.savefig(path, dpi=150)
    print(f"Saved {os.path.relpath(path)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A Bayesian network by SG-MCMC.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fast", action="store_true", help="10 epochs instead of 50")
    args = parser.parse_args()
    seed_everything(2)
    epochs = 10 if args.fast else 50
    data = TensorDataset(*observations(NUM_DATA, 0))
    batches = DataLoader(ConcatDataset([data] * PASSES), BATCH, shuffle=True)
    nsync = 2
    pushes = epochs * len(batches) // nsync  # of all workers together: they share an epoch's batches
    sampling = SGMCMC(burn_in=pushes // 4, thin=pushes // 60, max_samples=30)
    advanced = Advanced(overlap=False)  # staleness widens the band
    strategy = ASGDStrategy(nsync=nsync, algorithm=sampling, advanced=advanced)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.workers,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = Network(lr=2e-5 / args.workers)
    trainer.fit(model, batches)
    if trainer.is_global_zero:
        x, y = observations(1000, 1)
        mean, deviation = predict(model, strategy.samples, x)
        covered = ((y - mean).abs() < 2 * deviation).float().mean()
        inside = predict(model, strategy.samples, torch.linspace(*GAP, 101).unsqueeze(1))[1].mean()
        error = (mean - curve(x)).square().mean().sqrt()
        print(f"{covered:.3f} of new observations within the band; error of the mean {error:.3f}")
        print(f"standard deviation {deviation.mean():.3f} where there are data, {inside:.3f} in the gap")
        band = [values.flatten().tolist() for values in predict(model, strategy.samples, LINE.unsqueeze(1))]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "bayesian.json").write_text(json.dumps([len(strategy.samples), *band]))
        save_picture(len(strategy.samples), *map(torch.tensor, band), RESULTS / "bayesian.png")


if __name__ == "__main__":
    main()
