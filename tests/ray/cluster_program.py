"""What the tests run on a small Ray cluster, in a process of its own: Ray leaves threads in the process that uses it.

Prints a JSON object of what was seen.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import CheckpointConfig, RunConfig, ScalingConfig

from lightning_asgd.core.foundation.errors import ASGDError, LaunchError
from lightning_asgd.ray import ASGDTrainer, ReportCallback, get_checkpoint, report_metrics

SAMPLES, EPOCHS, PROCESSES = 300, 2, 3
MUCH = 64  # more CPUs than there are
START_S, END_S = 240, 120  # other tests run on the same cores
SLOW_S = 0.2  # a step's seconds until so many processes have trained
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def count_samples(config: dict[str, Any]) -> None:
    """Add 1 to a sample's weight whenever it is trained."""
    atexit.register(Path(config["folder"], f"exits-{os.getpid()}").touch)
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_asgd import ASGDStrategy
    from lightning_asgd.algorithms import ASGD

    class Counts(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.nn.Parameter(torch.zeros(SAMPLES))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.0 if len([*Path(config["folder"]).glob("trains-*")]) >= PROCESSES else SLOW_S)
            loss = -self.seen[batch[0]].sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    class Notes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            Path(config["folder"], f"trains-{os.getpid()}").touch()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                report_metrics({"exactly": int((pl_module.seen.round() == EPOCHS).sum())})

    pl.seed_everything(1)
    strategy = ASGDStrategy(2, algorithm=ASGD("sum"))
    trainer = pl.Trainer(
        strategy=strategy, devices=1, max_epochs=EPOCHS, callbacks=[Notes(), ReportCallback()], **QUIET
    )
    trainer.fit(Counts(), DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=2, shuffle=True))


def wait() -> None:
    time.sleep(600)


def fail() -> None:
    atexit.register(time.sleep, 600)
    assert get_checkpoint() is None
    raise KeyError("no such column")


@ray.remote(num_cpus=0)
def train_in_a_task(folder: str) -> dict[str, Any]:
    """A Trainer with two workers, of classes that only this function knows."""
    import numpy
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_asgd import ASGDStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Notes(pl.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            drawn = numpy.random.random(), torch.are_deterministic_algorithms_enabled()
            Path(folder, f"drawn-{trainer.global_rank}").write_text(str(drawn))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            Path(folder, f"rank-{trainer.global_rank}").write_text(str(os.getpid()))

    numpy.random.seed(7)
    about: Any = {"devices": 2, "max_epochs": 1, "callbacks": [Notes()], "deterministic": True, **QUIET}
    trainer = pl.Trainer(strategy=ASGDStrategy(), **about)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=4))
    left = [str(path) for path in Path(tempfile.gettempdir()).glob("lightning_asgd-*/program")]
    if multiprocessing.current_process()._config.get("tempdir"):  # type: ignore[attr-defined]
        left.append("a folder of sockets, which Ray's process would not remove")
    ranks = {path.name: int(path.read_text()) for path in Path(folder).glob("rank-*")}
    drawn = sorted({path.read_text() for path in Path(folder).glob("drawn-*")})
    mine = {"first_is_mine": ranks.get("rank-0") == os.getpid(), "drawn": drawn}
    return {"ranks": sorted(ranks), **mine, "left": left}


def main(folder: str) -> dict[str, Any]:
    ray.init(num_cpus=4, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
    task = train_in_a_task.remote(folder)
    seen: dict[str, Any] = {
        "no_room": refused(fail, folder, {"CPU": MUCH}),
        "raises": refused(fail, folder, {"CPU": 1}),
    }
    seen["no_board"] = refused(wait, folder, {"CPU": 1}, lambda run: ray.kill(run._board.actor))
    seen["task"] = ray.get(task)
    run = trainer(count_samples, folder, {"CPU": 1}).start()
    deadline = time.monotonic() + 200
    while len(found := sorted(Path(folder).glob("trains-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(found[-1].name.partition("-")[2]), signal.SIGKILL)
    result = run.result(240)
    while ray.available_resources().get("CPU") != 4 and time.monotonic() < deadline + 60:  # Ray frees them afterwards
        time.sleep(0.1)
    while len(exits := [*Path(folder).glob("exits-*")]) < 2 and time.monotonic() < deadline + 60:
        time.sleep(0.1)
    seen["run"] = {
        "exactly": result.metrics["exactly"],
        "epochs": [int(m["epoch"]) for m in result.metrics_dataframe.to_dict("records") if m["epoch"] == m["epoch"]],
        "checkpoints": len(result.best_checkpoints),
        "processes": len([*Path(folder).glob("trains-*")]),
        "exits": len(exits),
        "free": ray.available_resources().get("CPU"),
    }
    with result.checkpoint.as_directory() as checkpoint:
        seen["run"]["file"] = os.listdir(checkpoint)
    return seen


def trainer(function: Any, folder: str, resources: dict[str, float]) -> ASGDTrainer:
    return ASGDTrainer(
        function,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker=resources),
        run_config=RunConfig(name="run", storage_path=folder, checkpoint_config=CheckpointConfig(num_to_keep=1)),
        resources_per_server={"CPU": 1},
        place_s=1 if resources["CPU"] == MUCH else START_S,
    )


def refused(function: Any, folder: str, resources: dict[str, float], disturb: Any = lambda run: None) -> str:
    with contextlib.suppress(TimeoutError):
        try:
            run = trainer(function, folder, resources).start()
            disturb(run)
            run.result(END_S)
        except (ASGDError, LaunchError) as error:
            return f"{type(error).__name__}: {error}; {error.__cause__!r}"
    return "nothing was raised"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = main(temporary)
        trainer(wait, temporary, {"CPU": 1}).start()  # trains when the program ends
        json.dump(found, sys.stdout)
