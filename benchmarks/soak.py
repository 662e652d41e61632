"""Many short fits in one program: nothing may be left behind, and memory may not grow.

Two programs, each a process of its own: one whose Trainer forks two workers for every fit, one that trains in its own
process. After every fit the program reports its processes, threads, open files, listening ports and memory, and those
of its servers. Servers and the process that ends them stay from one fit to the next: what counts is that there are
never more of them, and that after the program's end nothing is left: no process, no port, nothing in /dev/shm or in
the temporary directory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import CONSOLE, verdict
from jobs import megabytes
from ranks import clean_environment
from rich.table import Table
from throughput import build_loader, build_module, trainer_options

from lightning_asgd.core.job.reaper import started

SETTLE = 10  # first fits, in which caches fill
GROWTH_MB = 6.0  # between the first and the last third of the fits; keeping every fit's weights would make 25
GONE_S = 15.0  # for processes to end after their program
COUNTS = ("processes", "threads", "files", "ports", "server threads", "server files")
MEMORY = ("memory", "server memory")


# ---------------------------------------------------------------------- the program that is watched


def soak(mode: str, fits: int) -> None:
    """Fit again and again, and print the figures after each fit as a line of JSON."""
    import pytorch_lightning as pl
    import torch

    from lightning_asgd import ASGDStrategy

    torch.set_num_threads(1)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    how: dict[str, Any] = {"devices": 2, "start_method": "fork"} if mode == "fork" else {"devices": 1}
    devices = how.pop("devices")
    for _ in range(fits):
        begun = time.monotonic()
        strategy = ASGDStrategy(nsync=2, **how)
        trainer = pl.Trainer(**trainer_options(), strategy=strategy, devices=devices, limit_train_batches=5)
        trainer.fit(build_module(100_000), build_loader(5 * 8 * devices, 8, distinct=64))
        least, most = (5, 5) if devices == 1 else (1, 9)  # of ten in all: the faster worker takes more
        if not least <= strategy.stats.steps <= most:
            raise RuntimeError(f"Worker 0 took {strategy.stats.steps} steps. Expected {least} to {most}.")
        del strategy, trainer
        gc.collect()  # a Trainer is a web of cycles: what is still there now is held by somebody
        print(json.dumps({**figures(), "seconds": time.monotonic() - begun}), file=report, flush=True)


def figures() -> dict[str, Any]:
    """What this process and its servers hold now."""
    me = psutil.Process()
    children = me.children(recursive=True)
    servers = [p for p in children if "lightning_asgd.core.server.process" in p.cmdline()]
    connections = [c for p in (me, *servers) for c in p.net_connections("inet")]
    return {
        "processes": len(children),
        "threads": me.num_threads(),
        "files": me.num_fds(),
        "ports": sum(c.status == psutil.CONN_LISTEN for c in connections),
        "server threads": sum(p.num_threads() for p in servers),
        "server files": sum(p.num_fds() for p in servers),
        "memory": megabytes(me),
        "server memory": sum(megabytes(p) for p in servers),
        "listening": sorted({c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}),
        "children": [(p.pid, started(p.pid)) for p in children],
    }


# ---------------------------------------------------------------------- watching it


def watch(mode: str, fits: int) -> bool:
    """Run the program and judge what it reported and what it left.

    Returns:
        whether all is well.
    """
    CONSOLE.print(f"\n[bold]{mode}[/]: {fits} fits")
    memory_files = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--run", mode, "--fits", str(fits)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": scratch}
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, "inductor")  # torch's own, kept by intent
        with tempfile.TemporaryFile() as errors:
            program = subprocess.Popen(
                command, env=environment, cwd=scratch, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            reports = _follow(program, fits)
            errors.seek(0)
            last_words = errors.read().decode(errors="replace")[-3000:]
        left = _left_behind(reports, memory_files)
        left += [f"temporary file {path.relative_to(scratch)}" for path in Path(scratch).rglob("*") if path.is_file()]
        empty = sum(path.is_dir() for path in Path(scratch).iterdir())
    if program.returncode != 0 or len(reports) != fits:
        CONSOLE.print(f"[red]FAIL[/]  ended with exit code {program.returncode} after {len(reports)} fits")
        CONSOLE.print(last_words, markup=False)
        return False
    verdicts = [*_judge(reports), ("nothing is left after the end" if not left else "; ".join(left), not left)]
    for text, good in verdicts:
        verdict(good, f"{mode}: {text}")
    if empty:
        CONSOLE.print(
            f"note: {empty} empty directories are left in the temporary directory; Lightning's forking launcher"
        )
        CONSOLE.print("makes one per fit and removes only the file in it, whatever the strategy.")
    return all(good for _, good in verdicts)


def _follow(program: subprocess.Popen[str], fits: int) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    try:
        assert program.stdout is not None
        for line in program.stdout:
            reports.append(json.loads(line))
            if len(reports) in (1, fits) or len(reports) % 10 == 0:
                last = reports[-1]
                shown = ", ".join(f"{last[key]} {key}" for key in COUNTS[:4])
                memory = ", ".join(f"{key} {last[key]:.1f} MB" for key in MEMORY)
                CONSOLE.print(f"  {len(reports):3d}/{fits}  {last['seconds']:.2f} s, {shown}, {memory}")
        program.wait(GONE_S)
    finally:
        program.kill()
        program.wait()
    return reports


def _judge(reports: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    settled = reports[min(SETTLE, len(reports) // 2) :]
    table = Table("", "after the first fits", "at the end", "largest")
    verdicts = []
    for key in COUNTS:
        values = [r[key] for r in settled]
        table.add_row(key, *(str(v) for v in (values[0], values[-1], max(values))))
        # A thread or process that is just ending may be seen; one that stays is a leak.
        grown = statistics.median(values[-5:]) - statistics.median(values[:5])
        verdicts.append((f"{key} {values[0]} -> {values[-1]}", grown <= 0))
    for key in MEMORY:
        values = [r[key] for r in settled]
        table.add_row(key, *(f"{v:.1f} MB" for v in (values[0], values[-1], max(values))))
        third = max(1, len(values) // 3)
        grown = statistics.median(values[-third:]) - statistics.median(values[:third])
        verdicts.append((f"{key} grew by {grown:.1f} MB", grown <= GROWTH_MB))
    CONSOLE.print(table)
    return verdicts


def _left_behind(reports: list[dict[str, Any]], memory_files: set[str]) -> list[str]:
    """Processes, ports and shared memory that are still there some seconds after the program's end."""
    pids = {(pid, since) for r in reports for pid, since in r["children"]}
    ports = {port for r in reports for port in r["listening"]}
    deadline = time.monotonic() + GONE_S
    while True:
        left = [f"process {pid}" for pid, since in pids if _runs(pid, since)]
        listening = {c.laddr.port for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}
        left += [f"port {port}" for port in sorted(ports & listening)]
        left += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - memory_files) if _orphan(name)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _runs(pid: int, since: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return started(pid) == since and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _orphan(name: str) -> bool:
    """Whether no process uses a file in /dev/shm; other programs' files do not count."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text(errors="replace"):
                return False
    return Path("/dev/shm", name).exists()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--fits", type=int, default=100, help="fits of each program (default %(default)s)")
    parser.add_argument("--mode", choices=("fork", "single"), nargs="+", default=["fork", "single"])
    parser.add_argument("--run", choices=("fork", "single"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        soak(args.run, args.fits)
        return 0
    clean_environment()
    package = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    verdicts = [watch(mode, args.fits) for mode in args.mode]
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
