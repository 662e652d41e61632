"""What stopping.py starts and stops: a program that trains in one of the ways, without end.

python benchmarks/stopping_program.py trainer zmq FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

WAY, TRANSPORT, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
RUN = os.environ.get("STOPPING_RUN", "")
STEP_S = 0.02


def trains(rank: int) -> None:
    """Let stopping.py know which process is which worker."""
    file = FOLDER / f"worker{rank}"
    if not file.exists():
        file.with_suffix(".new").write_text(str(os.getpid()))
        file.with_suffix(".new").rename(file)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(4000, 4))


def fit(strategy: Any, *, number: int | None = None, **about: Any) -> None:
    """Train with a Trainer. ``number`` is the worker's, where its rank does not tell."""
    import counts
    import pytorch_lightning as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            if WAY == "tables":
                from lightning_asgd import ServedEmbedding

                self.table = ServedEmbedding(1000, 4, folder=FOLDER / "tmp" / "table", optimizer="sgd", lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 5:
                place = os.environ.get("LOCAL_RANK", "0") if WAY == "islands" else self.global_rank
                trains(int(place) if number is None else number)
            time.sleep(STEP_S)
            more = self.table(torch.randint(1000, (4,))) if WAY == "tables" else 0.0
            return self.net(batch[0] + more).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    counts.fit(Model(), (DataLoader(data(), batch_size=4),), max_epochs=-1, strategy=strategy, **about)


def loop() -> None:
    """Train with a plain loop."""
    from lightning_asgd import AsyncSGD

    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with AsyncSGD(net, optimizer, nsync=5, transport=TRANSPORT) as asgd:
        for _ in asgd.epochs(10**6):
            for number, (x,) in enumerate(asgd.batches(data(), batch_size=4)):
                if number == 5:
                    trains(int(os.environ["RANK"]))
                time.sleep(STEP_S)
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()


def on_ray() -> None:
    """Train on a Ray cluster of this machine."""
    import ray
    from ray.train import RunConfig, ScalingConfig

    from lightning_asgd import ASGDStrategy
    from lightning_asgd.ray import ASGDTrainer

    def train() -> None:
        fit(ASGDStrategy(nsync=5), devices=1)

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ASGDTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="stopping", storage_path=str(FOLDER)),
        transport=TRANSPORT,
    ).fit()


def main() -> None:
    """Train in the way that was asked for."""
    from lightning_asgd import ASGDStrategy, Timeouts

    if WAY == "loop":
        loop()
    elif WAY == "ray":
        on_ray()
    elif WAY == "attached":
        number = int(os.environ["STOPPING_NUMBER"])
        about: Any = {"run": RUN, "timeouts": Timeouts(silence_s=10.0)}
        fit(ASGDStrategy(nsync=5, transport=TRANSPORT, **about), number=number, devices=1)
    elif WAY == "nodes":
        fit(ASGDStrategy(nsync=5, transport=TRANSPORT), devices=1, num_nodes=2)
    elif WAY == "islands":
        fit(ASGDStrategy(nsync=5, transport=TRANSPORT, island=2), devices=4)
    else:
        start_method = "popen" if WAY == "tables" else WAY
        fit(ASGDStrategy(nsync=5, transport=TRANSPORT, start_method=start_method), devices=2)


if __name__ == "__main__":
    main()
