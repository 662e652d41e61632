"""Digits on a Ray cluster: servers and workers are actors that Ray places, and starts again when they die.

    python examples/ray_cluster.py                    # on a node of a cluster, or on one machine without one
    python examples/ray_cluster.py --workers 2 8      # two to eight workers, as the cluster has room
    python examples/ray_cluster.py --fast             # 2 epochs

Needs pip install '.[ray,examples]'.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

# ---
from digits import DigitsCNN, loaders
from pytorch_lightning import Trainer, seed_everything
from ray.train import CheckpointConfig, RunConfig, ScalingConfig

from lightning_asgd import ASGDStrategy
from lightning_asgd.ray import ASGDTrainer, ReportCallback


def train(config: dict[str, Any]) -> None:
    seed_everything(1)  # all workers alike: they must agree on the order of the data
    trainer = Trainer(
        devices=1,
        strategy=ASGDStrategy(nsync=10),
        max_epochs=config["epochs"],
        callbacks=[ReportCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(DigitsCNN(lr=0.02), *loaders())


def main(workers: int | tuple[int, int], epochs: int) -> None:
    best = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_acc")
    trainer = ASGDTrainer(
        train,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),  # or use_gpu=True
        run_config=RunConfig(name="digits", storage_path=str(RESULTS), checkpoint_config=best),
        num_servers=1,
        resources_per_server={"CPU": 0.5},
    )
    result = trainer.fit()
    print(f"accuracy {result.metrics['val_acc']:.3f} after {result.metrics['epoch'] + 1} epochs")
    print(result.get_best_checkpoint("val_acc", "max"))


RESULTS = Path(__file__).resolve().parent.parent / "results" / "ray"

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits on a Ray cluster.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="number, or least and most")
    parser.add_argument("--fast", action="store_true", help="2 epochs instead of 15")
    args = parser.parse_args()
    main(args.workers[0] if len(args.workers) == 1 else (args.workers[0], args.workers[1]), 2 if args.fast else 15)
