"""Training on a Ray cluster: several raylets on this machine, with nodes that are lost while it trains.

    python benchmarks/ray_cluster.py                  # everything: about ten minutes on two cores
    python benchmarks/ray_cluster.py faults scale     # some: accuracy, faults, scale, train, tune

accuracy   digits with 2 servers and 4 workers, beside DDP with 4 workers: within 0.02
faults     the node of two workers is lost, then that of a server, and a replacement has no room for a minute; every
           sample is trained once per epoch, and the replacements of workers train within 10 s after their imports
scale      1 worker, then 4, then 2 in one epoch; every sample is trained once
train      Ray Train's TorchTrainer with 3 workers, one slower by 0.1 s per step: RayASGDStrategy beside RayDDPStrategy,
           interleaved, in short epochs of 30 steps; at most a third of the seconds
tune       8 trials of 2 workers, 4 side by side, with ASHA; no process is left

Training a sample adds 1 to that sample's parameter (faults, scale), so the weights say what was lost or trained twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from common import CONSOLE, spread, verdict

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
sys.path[:0] = FOLDERS

EPOCHS = 15
SAMPLES, STEP_S = 3000, 0.1
START_S = 20.0  # within which servers start, of those that a worker waits for no longer
FAST = "fast"  # a file that is there once all has happened: then steps take no longer than they must
MEMORY = 80_000_000  # bytes of a node's object store
REPLACED_S = 10.0
FOUND: list[tuple[bool, str]] = []


def check(holds: bool, what: str) -> None:
    """Print whether something holds, and remember it: Ray prints much between these lines."""
    FOUND.append((holds, what))
    show(holds, what)


def show(holds: bool, what: str) -> None:
    verdict(holds, f"{what}")


@contextlib.contextmanager
def cluster(*nodes: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    """A cluster whose head has no CPU to give, and these nodes."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    try:
        found = [made.add_node(object_store_memory=MEMORY, **node) for node in nodes]
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=False)
        yield made, found
    finally:
        ray.shutdown()
        made.shutdown()


def place(cpus: int, **resources: int) -> dict[str, Any]:
    """A node."""
    return {"num_cpus": cpus, "resources": resources}


def trainer(function: Callable[..., Any], config: dict[str, Any], workers: Any, servers: int, folder: str) -> Any:
    """A trainer whose workers and servers go to the nodes that have these resources."""
    from ray.train import RunConfig, ScalingConfig

    from lightning_asgd.ray import ASGDTrainer

    wanted = {"CPU": 0.5, "worker": 1}
    scaling = ScalingConfig(num_workers=workers, resources_per_worker=wanted, placement_strategy="SPREAD")
    return ASGDTrainer(
        function,
        train_loop_config=config,
        scaling_config=scaling,
        run_config=RunConfig(name=f"run{time.time_ns()}", storage_path=folder),
        num_servers=servers,
        resources_per_server={"CPU": 0.5, "server": 1},
    )


# ---------------------------------------------------------------------- training functions


def train_digits(config: dict[str, Any]) -> None:
    """Digits, as on one machine."""
    import pytorch_lightning as pl
    import torch
    from digits import DigitsCNN, loaders

    from lightning_asgd import ASGDStrategy
    from lightning_asgd.ray import ReportCallback

    torch.set_num_threads(1)
    pl.seed_everything(1)
    made = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ASGDStrategy(nsync=10),
        max_epochs=config["epochs"],
        callbacks=[ReportCallback()],
        **quiet(),
    )
    made.fit(DigitsCNN(lr=config["lr"]), *loaders())


def count_samples(config: dict[str, Any]) -> None:
    """Count how often each sample is trained, and note when this process has imported everything and trains."""
    import pytorch_lightning as pl
    import torch
    from counts import Counts
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_asgd import ASGDStrategy, Timeouts
    from lightning_asgd.algorithms import ASGD

    torch.set_num_threads(1)
    notes = Path(config["notes"], f"{os.getpid()}.json")
    times = {"imports": time.time()}

    class Notes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.step_s = 0.0 if Path(config["notes"], FAST).exists() else STEP_S
            if "trains" not in times:
                times["trains"] = time.time()
                notes.write_text(json.dumps(times))

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                torch.save(pl_module.seen.detach(), Path(config["notes"], "seen.pt"))

    pl.seed_everything(1)
    strategy = ASGDStrategy(nsync=2, algorithm=ASGD("sum"), timeouts=Timeouts(start_s=START_S))
    made = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=config["epochs"],
        callbacks=[Notes()],
        **quiet(),
    )
    data = TensorDataset(torch.arange(SAMPLES))
    made.fit(Counts(SAMPLES, STEP_S), DataLoader(data, batch_size=2, shuffle=True))


def quiet() -> dict[str, Any]:
    return {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def train_in_step(config: dict[str, Any]) -> None:
    """For Ray Train: digits, with one slow worker."""
    import lightning.pytorch as pl  # which Ray takes where both are installed
    import ray.train
    import ray.train.collective
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    from lightning_asgd.ray import RayASGDStrategy

    module, data = _digits(pl)
    rank, times = ray.train.get_context().get_world_rank(), {}

    class Slow(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            times["trains"] = time.time()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if rank == 2:
                time.sleep(0.1)

    strategy = RayASGDStrategy(nsync=10) if config["asgd"] else RayDDPStrategy()
    made = prepare_trainer(
        pl.Trainer(
            accelerator="cpu",
            devices="auto",
            strategy=strategy,
            plugins=[RayLightningEnvironment()],
            max_epochs=config["epochs"],
            callbacks=[Slow(), RayTrainReportCallback()],
            **quiet(),
        )
    )
    ray.train.collective.barrier()  # all have imported everything
    begun = time.time()
    made.fit(module, data)
    seconds, start = time.time() - begun, times["trains"] - begun
    accuracy = made.validate(module, _validation(), verbose=False)[0]["val_acc"]
    if rank == 0:  # Ray Train returns only metrics that are reported with a checkpoint
        Path(config["notes"]).write_text(json.dumps({"seconds": seconds, "start": start, "accuracy": accuracy}))


def _digits(pl: Any) -> tuple[Any, Any]:
    """The digits' network as a module of the Lightning that Ray uses, and its data."""
    import torch
    from digits import DigitsCNN, loaders

    torch.set_num_threads(1)
    pl.seed_everything(1)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            inner = DigitsCNN()
            self.net, self.lr, self.momentum = inner.net, inner.lr, inner.momentum

        training_step = DigitsCNN.training_step
        validation_step = DigitsCNN.validation_step
        configure_optimizers = DigitsCNN.configure_optimizers

    return Module(), loaders()[0]  # 30 steps of each worker in an epoch


def _validation() -> Any:
    from digits import loaders

    return loaders()[1]


def trial(config: dict[str, Any]) -> None:
    """For Ray Tune: a Trainer with two workers of its own."""
    import pytorch_lightning as pl
    import torch
    from digits import DigitsCNN, loaders
    from ray.tune.integration.pytorch_lightning import TuneReportCallback

    from lightning_asgd import ASGDStrategy

    torch.set_num_threads(1)
    made = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ASGDStrategy(nsync=10),
        max_epochs=8,
        callbacks=[TuneReportCallback({"accuracy": "val_acc"}, on="validation_end")],
        num_sanity_val_steps=0,
        **quiet(),
    )
    made.fit(DigitsCNN(lr=config["lr"]), *loaders())


# ---------------------------------------------------------------------- what is tried


def accuracy(folder: str) -> None:
    from ray.train import Checkpoint

    with cluster(place(4, worker=2, server=1), place(4, worker=2, server=1), place(2)):
        found = trainer(train_digits, {"epochs": EPOCHS, "lr": 0.05}, 4, 2, folder).fit()
    ddp = json.loads(subprocess.run([sys.executable, __file__, "--ddp"], check=True, capture_output=True).stdout)
    ours = found.metrics["val_acc"]
    check(ours > ddp - 0.02, f"accuracy {ours:.3f}, DDP with 4 workers {ddp:.3f}")
    check(isinstance(found.checkpoint, Checkpoint), f"{len(found.best_checkpoints)} checkpoints came back")


def accuracy_of_ddp() -> None:
    import pytorch_lightning as pl
    import torch
    from digits import DigitsCNN, loaders

    torch.set_num_threads(1)
    pl.seed_everything(1)
    made = pl.Trainer(accelerator="cpu", devices=4, strategy="ddp_fork", max_epochs=EPOCHS, **quiet())
    made.fit(DigitsCNN(), *loaders())
    print(float(made.callback_metrics["val_acc"]))


def faults(folder: str) -> None:
    import torch

    nodes = place(4, worker=2, server=1), place(1, server=1), place(2, worker=2)
    with cluster(*nodes) as (made, found), tempfile.TemporaryDirectory() as notes:
        run = trainer(count_samples, {"epochs": 3, "notes": notes}, 4, 2, folder).start()
        await_workers(notes, 4)
        time.sleep(3)
        lost = time.time()
        made.remove_node(found[2], allow_graceful=False)
        made.add_node(object_store_memory=MEMORY, **place(2, worker=2))
        CONSOLE.print("  the node of two workers is lost, and there is a new one")
        await_workers(notes, 6)
        report_replacements(notes, lost, "workers")
        made.remove_node(found[1], allow_graceful=False)
        CONSOLE.print("  the node of a server is lost, and there is no room for another server")
        time.sleep(3 * START_S)
        made.add_node(object_store_memory=MEMORY, **place(1, server=1))
        CONSOLE.print("  now there is")
        Path(notes, FAST).touch()
        run.result(300)
        report_seen(torch.load(Path(notes, "seen.pt")), 3)


def scale(folder: str) -> None:
    import torch

    with cluster(place(6, worker=4, server=1)), tempfile.TemporaryDirectory() as notes:
        run = trainer(count_samples, {"epochs": 1, "notes": notes}, (1, 4), 1, folder).start()
        run.scale(1)
        await_workers(notes, 1)
        run.scale(4)
        await_workers(notes, 4)
        time.sleep(2)
        run.scale(2)
        time.sleep(10)
        check(run.num_workers == 2, f"{run.num_workers} workers after scale(2)")
        Path(notes, FAST).touch()
        run.result(300)
        report_seen(torch.load(Path(notes, "seen.pt")), 1)


def await_workers(notes: str, processes: int) -> None:
    """Wait until this number of processes have trained."""
    deadline = time.monotonic() + 120
    while len([*Path(notes).glob("*.json")]) < processes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len([*Path(notes).glob('*.json')])} of {processes} processes have trained")
        time.sleep(0.1)


def report_replacements(notes: str, lost: float, what: str) -> None:
    times = [json.loads(file.read_text()) for file in Path(notes).glob("*.json")]
    new = [each for each in times if each["imports"] > lost]
    seconds = [each["trains"] - each["imports"] for each in new]
    after = [each["trains"] - lost for each in new]
    check(
        bool(new) and max(seconds) < REPLACED_S,
        f"{len(new)} replacement {what} train {max(seconds):.1f} s after their imports, "
        f"{max(after):.1f} s after the loss",
    )


def report_seen(seen: Any, epochs: int) -> None:
    times = seen.round().long()
    wrong = [f"sample {k}: {times[k]}" for k in (times != epochs).nonzero().flatten().tolist()]
    others = f"; the others, with how often they were trained: {', '.join(wrong[:20])}" if wrong else ""
    right = f"{SAMPLES - len(wrong)} of {SAMPLES} samples"
    check(not wrong, f"{right} were trained once in each of {epochs} epochs{others}")


def train(folder: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from lightning_asgd.ray import ASGDConfig

    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    ray.init(num_cpus=4, object_store_memory=MEMORY, log_to_driver=False)
    try:
        for turn in range(3):
            for asgd in (True, False):
                notes = str(Path(folder, f"notes{time.time_ns()}"))
                made = TorchTrainer(
                    train_in_step,
                    train_loop_config={"asgd": asgd, "epochs": 6, "notes": notes},
                    scaling_config=ScalingConfig(num_workers=3, resources_per_worker={"CPU": 1}),
                    run_config=RunConfig(name=f"train{turn}{asgd}{time.time_ns()}", storage_path=folder),
                    torch_config=ASGDConfig() if asgd else None,
                )
                made.fit()
                found[asgd].append(last := json.loads(Path(notes).read_text()))
                name = "RayASGDStrategy" if asgd else "RayDDPStrategy"
                shown = f"{last['seconds']:.1f} s, {last['start']:.1f} of them before training begins"
                CONSOLE.print(f"  {name:<16} {shown}; accuracy {last['accuracy']:.3f}")
    finally:
        ray.shutdown()
        for left in Path(tempfile.gettempdir()).glob("lightning_checkpoints-job_id=*"):  # of RayTrainReportCallback
            shutil.rmtree(left, ignore_errors=True)
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(found[True], found[False], strict=True)]
    shown = spread(ratios)
    check(statistics.median(ratios) <= 1 / 3, f"seconds of RayASGDStrategy / RayDDPStrategy: {shown}")


def tune(folder: str) -> None:
    import ray
    from ray import tune as raytune
    from ray.tune.schedulers import ASHAScheduler

    before = set(psutil.pids())
    ray.init(num_cpus=8, object_store_memory=MEMORY, log_to_driver=False)
    try:
        tuner = raytune.Tuner(
            raytune.with_resources(trial, {"cpu": 2}),
            param_space={"lr": raytune.grid_search([0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001])},
            tune_config=raytune.TuneConfig(
                metric="accuracy",
                mode="max",
                scheduler=ASHAScheduler(max_t=8, grace_period=2, reduction_factor=2),
                max_concurrent_trials=4,
            ),
            run_config=raytune.RunConfig(storage_path=folder, verbose=0),
        )
        results = tuner.fit()
        iterations = sorted(result.metrics.get("training_iteration", 0) for result in results)
        best = results.get_best_result().metrics["accuracy"]
        check(not results.errors and len(results) == 8, f"8 trials, {len(results.errors)} failed, best {best:.3f}")
        check(iterations[0] < 8, f"ASHA stopped some early: epochs {iterations}")
        time.sleep(3)
        left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and _is_ours(p)]
        check(not left, f"{len(left)} processes of trials are left")
    finally:
        ray.shutdown()


def _is_ours(process: psutil.Process) -> bool:
    words = " ".join(process.info["cmdline"] or ())
    return "lightning_asgd" in words


TRIALS = {"accuracy": accuracy, "faults": faults, "scale": scale, "train": train, "tune": tune}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"{', '.join(TRIALS)}; all without one")
    parser.add_argument("--ddp", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ddp:
        accuracy_of_ddp()
        return 0
    if unknown := sorted(set(args.trials) - set(TRIALS)):
        parser.error(f"unknown: {', '.join(unknown)}. Expected {', '.join(TRIALS)}")
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # how often Ray Train fetches reports; else 2 s
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, str(ROOT)])  # of the cluster's processes
    with tempfile.TemporaryDirectory() as folder:
        for name in args.trials or TRIALS:
            CONSOLE.print(f"[bold]{name}[/]")
            begun = time.monotonic()
            TRIALS[name](folder)
            CONSOLE.print(f"  {time.monotonic() - begun:.0f} s")
    CONSOLE.rule()
    for found in FOUND:
        show(*found)
    return 0 if all(holds for holds, _ in FOUND) else 1


if __name__ == "__main__":
    sys.exit(main())
