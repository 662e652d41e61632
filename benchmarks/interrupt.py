"""Interrupt a job at random moments, by Ctrl-C, SIGTERM and SIGKILL: what is left behind?

    python benchmarks/interrupt.py               # 50 moments, about ten minutes on two cores
    python benchmarks/interrupt.py --times 6     # a quick look

Two workers train scikit-learn's digits, with a checkpoint every few steps. They are forked, or started by Lightning as
new processes. At a moment drawn by seed (one in four during start-up, the others in the first seconds of training) the
main process gets SIGTERM or SIGKILL, or its whole group SIGINT, as from a terminal's Ctrl-C. Ten seconds later no
process of the job may be left, nothing in /dev/shm, and every checkpoint must load and be whole.

Exits with 1 if not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import psutil
from common import CONSOLE, verdict
from ranks import clean_environment

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

GONE_S = 10.0
TRAINS_S = 6.0  # of training, at most, before the interruption
EARLY = 0.25  # share of the interruptions that come before training
START_S = 60.0
SETTLE_S = 0.5  # in which a process that was about to be started would be seen
MARK = "INTERRUPTED_JOB"  # environment variable by which the processes of a job are known
HOW = ("subprocess", "fork")
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}


# ---------------------------------------------------------------------- the program that is interrupted


def train(how: str, folder: Path) -> None:
    """Train until somebody ends it; a file tells when training has begun."""
    import torch
    from counts import fit
    from digits import DigitsCNN, loaders
    from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint

    from lightning_asgd import ASGDStrategy

    torch.set_num_threads(1)
    strategy = ASGDStrategy(nsync=5) if how == "subprocess" else ASGDStrategy(nsync=5, start_method=how)
    saves = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last=True)
    callbacks = [saves, LambdaCallback(on_train_start=lambda *_: (folder / "trains").touch())]
    about = {"devices": 2, "max_epochs": -1, "enable_checkpointing": True}
    fit(DigitsCNN(), loaders(batch_size=16), strategy=strategy, callbacks=callbacks, **about)


# ---------------------------------------------------------------------- interrupting it


def processes(mark: str) -> list[psutil.Process]:
    """Those of a job that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def unusable(folder: Path) -> list[str]:
    """Checkpoints that do not load, or lack something."""
    import torch

    bad = []
    for path in sorted(folder.rglob("*.ckpt")):
        try:
            checkpoint = torch.load(path, weights_only=False)
            whole = {"state_dict", "optimizer_states", "global_step"} <= checkpoint.keys()
        except Exception as error:
            bad.append(f"{path.name} does not load: {error!r}")
        else:
            bad += [] if whole else [f"{path.name} lacks something: it has {', '.join(checkpoint)}"]
    return bad


def interrupt(how: str, what: str, chance: random.Random, start_s: float) -> tuple[list[str], int, float, float]:
    """One job and its end.

    Returns:
        what is wrong, the number of checkpoints, seconds until no process was left, seconds until it trained (0: it
        did not get as far).
    """
    memory_files = set(os.listdir("/dev/shm"))
    mark = uuid.uuid4().hex
    early = chance.random() < EARLY
    moment = chance.uniform(0.0, start_s if early else TRAINS_S)  # after the program's start, or that of training
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as output:
        folder = Path(name)
        begun = time.monotonic()
        command = [sys.executable, __file__, "--train", how, "--folder", name]
        environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        trains_s = 0.0
        deadline = begun + (moment if early else START_S)
        while time.monotonic() < deadline and job.poll() is None:
            if not trains_s and (folder / "trains").exists():
                trains_s = time.monotonic() - begun
                deadline = min(deadline, begun + moment) if early else time.monotonic() + moment
            time.sleep(0.005)
        problems = []
        if job.poll() is not None:
            problems.append(f"ended with {job.returncode} by itself")
        elif not (early or trains_s):
            problems.append(f"did not train within {START_S:g} s")
        signalled = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if what == "Ctrl-C" else os.kill)(job.pid, SIGNALS[what])
        gone_s = signalled
        while (left := processes(mark)) or time.monotonic() < gone_s + SETTLE_S:
            job.poll()  # else it stays a zombie
            if left:
                gone_s = time.monotonic()
                if gone_s > signalled + GONE_S:
                    break
            time.sleep(0.05)
        gone_s -= signalled
        for process in left:
            with contextlib.suppress(psutil.Error):
                problems.append(f"process {process.pid} is left: {' '.join(process.cmdline())[:150]}")
                process.kill()
        job.wait()
        problems += [f"/dev/shm/{file} is left" for file in set(os.listdir("/dev/shm")) - memory_files]
        problems += unusable(folder)
        if problems:
            output.seek(0)
            problems.append(f"its last output: {output.read().decode(errors='replace')[-1500:]}")
        return problems, len(list(folder.rglob("*.ckpt"))), gone_s, trains_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", choices=HOW, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train is not None:
        train(args.train, args.folder)
        return 0
    clean_environment()
    chance = random.Random(args.seed)
    start_s, good = 10.0, 0
    longest: Counter[str] = Counter()
    trained = checkpoints = 0
    for number in range(args.times):
        how, what = HOW[number % len(HOW)], chance.choice(list(SIGNALS))
        problems, saved, gone_s, trains_s = interrupt(how, what, chance, start_s)
        start_s = trains_s or start_s
        trained += bool(trains_s)
        checkpoints += saved
        longest[what] = max(longest[what], gone_s)
        good += not problems
        when = f"{saved} checkpoints" if trains_s else "before training"
        verdict(not problems, f"{number + 1:2d} {what} ({how}, {when}): nothing left after {gone_s:.1f} s")
        for problem in problems:
            CONSOLE.print(f"      {problem}", markup=False)
    CONSOLE.print(
        f"{good} of {args.times}: {trained} while training, {checkpoints} checkpoints; slowest to end: "
        + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in sorted(longest.items()))
    )
    return 0 if good == args.times else 1


if __name__ == "__main__":
    sys.exit(main())
