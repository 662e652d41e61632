"""A worker that joins when its machine becomes available and leaves when the machine is taken away.

    lightning-asgd serve HOST:29400/digits                   # once, on a machine that stays; HOST is its address
    python examples/spot_worker.py --run HOST:29400/digits   # on every other machine

Start the second command several times, and stop any of the workers with Ctrl-C or with `kill`. `kill` sends SIGTERM, as
spot machines, Kubernetes and SLURM do; the worker then ends with exit code 0. The others take its data and continue. If
all have left, the next worker continues where they stopped. `lightning-asgd status HOST:29400` shows
who takes part.

    python examples/spot_worker.py --fast                 # 2 epochs

Expect the accuracy of one process, however many workers joined and left.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from digits import DigitsCNN, loaders
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_asgd import ASGDStrategy

RESULTS = Path(__file__).resolve().parent.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker of an elastic run.")
    parser.add_argument("--run", default="127.0.0.1:29400/digits", help="the run, as `lightning-asgd serve` prints it")
    parser.add_argument("--fast", action="store_true", help="2 epochs instead of 20")
    args = parser.parse_args()
    seed_everything(1)  # all workers alike: they must agree on the order of the data
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ASGDStrategy(nsync=10, run=args.run),
        max_epochs=2 if args.fast else 20,
        num_sanity_val_steps=0,  # nobody has the time
        callbacks=[ModelCheckpoint(RESULTS / "spot_worker", save_last=True)],  # in case that the servers' machine dies
        logger=False,
    )
    trainer.fit(DigitsCNN(lr=0.01), *loaders())  # with 0.05 one process, too, ends below 0.9 now and then
    accuracy = trainer.callback_metrics.get("val_acc")  # None for who comes after the last epoch
    print(f"{trainer.current_epoch} epochs" + ("" if accuracy is None else f", accuracy {accuracy:.3f}"))


if __name__ == "__main__":
    main()
