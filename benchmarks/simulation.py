"""The simulator's speed, and how well it predicts the time of a real run.

    python benchmarks/simulation.py              # about four minutes
    python benchmarks/simulation.py --repeats 1  # a quick look

1. 1,000 workers with 100 steps each on a quadratic of 10 dimensions, on one core.
2. Two workers of examples/quickstart.py: digits CNN, nsync=10, ten epochs with validation, of which the first warms up
   and is not counted. First a few epochs of a single worker with its own server are measured: each step's seconds,
   the time that an exchange takes from training, and the time between two epochs. The simulator gets these and nothing
   else. Its prediction is compared with the wall time of a real run with two workers, from the second epoch's first
   batch to the end of the last validation on worker 0.

Measurements of one worker do not include the second worker's competition for the cores' caches and clock. So the same
is also predicted from two such single workers that run at the same time, without exchanges.

Measurement, prediction and real run are interleaved; medians count. Rounds in which other programs took more than a
tenth of the processors are dropped: on a machine that is not always idle, --rounds sets the number of attempts. Exits
with 1 if the simulation takes a minute, or if the prediction from two at a time is off by more than 15 per cent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per process, as in the quickstart

import psutil
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

NSYNC = 10
EPOCHS = 10  # of the real run
MEASURED = 6  # epochs of a single worker, the first of which is not counted either
QUIET = 0.1  # share of all processors that other programs may take
LIMIT_S = 60.0
TOLERANCE = 0.15
START_S = 120.0
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


# ---------------------------------------------------------------------- in a worker's process


class Others:
    """What other programs take of the processors, as a share of all.

    Args:
        pid: process whose own time, and that of all its descendants, is not others'.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._before = self._look()

    def share(self) -> float:
        """Since this object was made."""
        total, busy, own = (now - then for now, then in zip(self._look(), self._before, strict=True))
        return max(0.0, busy - own) / total

    def _look(self) -> tuple[float, float, float]:
        times, own = psutil.cpu_times(), 0.0
        total = sum(times) - times.guest - times.guest_nice
        for process in (self._root, *self._root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                own += used.user + used.system
        return total, total - times.idle - times.iowait, own


def train(devices: int, epochs: int, start: Path, together: int) -> dict[str, Any]:
    """Train as the quickstart does.

    Args:
        devices: number of workers.
        epochs: number of epochs.
        start: a folder in which programs that are to train at the same time meet after the first epoch.
        together: how many these are.
    """
    from digits import DigitsCNN, Meter, loaders
    from pytorch_lightning import Callback, Trainer, seed_everything

    from lightning_asgd import ASGDStrategy

    class Watch(Callback):
        """Looks at the clock; the first epoch is not counted."""

        def __init__(self) -> None:
            self.steps: list[float] = []  # seconds, without the exchanges
            self.between: list[float] = []  # seconds between two epochs
            self.hook = 0.0  # seconds in which the strategy did what is due between two batches
            self.begun = self.ended = 0.0
            self.others: Others | None = None
            self.share = 0.0
            self._hook_now = 0.0
            self._batch_at: float | None = None
            self._epoch_at: float | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            advance = trainer.strategy.on_train_batch_start

            def timed(*args: Any, **kwargs: Any) -> None:
                since = time.perf_counter()
                advance(*args, **kwargs)
                self._hook_now = time.perf_counter() - since

            trainer.strategy.on_train_batch_start = timed

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            counts = trainer.current_epoch > 0
            if counts and not self.begun:
                (start / str(os.getpid())).touch()
                while len(list(start.iterdir())) < together:
                    time.sleep(0.001)
                self._epoch_at = None
                self.others = Others(os.getppid()) if trainer.is_global_zero else None
            now = time.perf_counter()
            if counts:
                self.begun = self.begun or now
                if self._epoch_at is not None:
                    self.between.append(now - self._epoch_at)
                self._note_step(now)
            self._epoch_at, self._batch_at = None, now if counts else None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx + 1 == trainer.num_training_batches:
                self._epoch_at = time.perf_counter()
                self._note_step(self._epoch_at)
                self._batch_at = None

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.ended = time.perf_counter()
            self.share = self.others.share() if self.others is not None else 0.0
            if self._epoch_at is not None:
                self.between.append(self.ended - self._epoch_at)

        def _note_step(self, now: float) -> None:
            if self._batch_at is not None:
                self.steps.append(now - self._batch_at - self._hook_now)
                self.hook += self._hook_now

    seed_everything(1)
    watch = Watch()
    alone: dict[str, Any] = {}
    if devices == 1:  # as many batches as each of two workers has
        alone = {"limit_train_batches": 45, "limit_val_batches": 2}
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=ASGDStrategy(nsync=NSYNC),
        max_epochs=epochs,
        callbacks=[watch, Meter()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **alone,
    )
    trainer.fit(DigitsCNN(), *loaders())
    if not trainer.is_global_zero:
        sys.exit()
    return {
        "others": watch.share,
        "wall_s": watch.ended - watch.begun,
        "steps_s": watch.steps,
        "between_s": watch.between,
        "exchange_s": watch.hook / (len(watch.steps) / NSYNC),
    }


# ---------------------------------------------------------------------- in the main process


def run(devices: int, epochs: int, together: int = 1) -> list[dict[str, Any]]:
    """Train in as many processes at once, each with its own servers and workers."""
    left_over = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in left_over and not k.startswith("LIGHTNING_ASGD_")}
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        start.mkdir()
        files = [Path(folder) / f"{i}.json" for i in range(together)]
        processes = []
        for file in files:
            arguments = [f"--devices={devices}", f"--epochs={epochs}", f"--together={together * devices}"]
            command = [sys.executable, __file__, f"--json={file}", f"--start={start}", *arguments]
            log = file.with_suffix(".log").open("w")
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        for process, file in zip(processes, files, strict=True):
            if process.wait(START_S) != 0:
                sys.exit(file.with_suffix(".log").read_text())
        return [json.loads(file.read_text()) for file in files]


def predict(measured: list[dict[str, Any]]) -> float:
    """Wall time of two workers, from what single ones took."""
    from lightning_asgd.simulation import Quadratic, Simulation, Trace

    speeds = [Trace(m["steps_s"], shuffled=True) for m in measured]
    report = Simulation(
        problem=Quadratic(),  # what is trained does not matter for the time
        workers=2,
        steps=45,
        epochs=EPOCHS - 1,
        exchange={"nsync": NSYNC},
        speed=[speeds[0], speeds[-1]],
        exchange_s=statistics.mean(m["exchange_s"] for m in measured),
        epoch_s=statistics.mean(s for m in measured for s in m["between_s"]),
    ).run()
    return report.time_s


def thousand() -> float:
    """Seconds of one core for 1,000 workers."""
    import torch

    from lightning_asgd.simulation import LogNormal, Quadratic, Simulation

    torch.set_num_threads(1)
    begun = time.process_time()
    Simulation(problem=Quadratic(10), workers=1000, steps=100, exchange={"nsync": 10}, speed=LogNormal(0.1, 0.3)).run()
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description="The simulator's speed, and its prediction of a real run.")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count")
    parser.add_argument("--rounds", type=int, default=15, help="at most this many rounds, including disturbed ones")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--together", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.devices:
        args.json.write_text(json.dumps(train(args.devices, args.epochs, args.start, args.together)))
        return

    seconds = statistics.median(thousand() for _ in range(min(3, args.repeats)))
    CONSOLE.print(f"1,000 workers, 100 steps each, nsync 10: {seconds:.1f} s of one core")

    CONSOLE.print(f"\nTwo workers of the quickstart, {EPOCHS - 1} epochs of 45 steps, in seconds:")
    ratios: dict[str, list[float]] = {"one": [], "two": []}
    for _ in range(args.rounds):
        one, two, (real,) = run(1, MEASURED), run(1, MEASURED, together=2), run(2, EPOCHS)
        share = max(result["others"] for result in (*one, *two, real))
        predicted = {"one": predict(one), "two": predict(two)}
        now = {name: value / real["wall_s"] for name, value in predicted.items()}
        CONSOLE.print(
            f"real {real['wall_s']:.2f}; from one worker alone {predicted['one']:.2f} (ratio {now['one']:.2f}), "
            f"from two at once {predicted['two']:.2f} (ratio {now['two']:.2f}); step "
            f"{statistics.mean(one[0]['steps_s']):.5f}, exchange {one[0]['exchange_s']:.5f}, between epochs "
            f"{statistics.mean(one[0]['between_s']):.4f}; others took {100 * share:.0f} % of the processors",
            style=None if share <= QUIET else "dim",
        )
        if share <= QUIET:
            for name, value in now.items():
                ratios[name].append(value)
        if len(ratios["two"]) == args.repeats:
            break
    if not ratios["two"]:
        sys.exit("Other programs took too much of the processors in every round: try again on a quiet machine.")
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    CONSOLE.print(
        f"Predicted / real, median of {len(ratios['two'])} quiet rounds: {medians['one']:.2f} from one worker alone, "
        f"{medians['two']:.2f} from two at once"
    )
    good = seconds < LIMIT_S and abs(medians["two"] - 1) <= TOLERANCE
    CONSOLE.print("Within the targets." if good else "[bold]Not within the targets.")
    sys.exit(not good)


if __name__ == "__main__":
    main()
