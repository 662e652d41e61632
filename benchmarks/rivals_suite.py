"""Samples per second of torchft and hivemind beside DDP, local SGD and A-SGD: equal workers, and one 4 times slower.

    python benchmarks/rivals_suite.py                  # about 20 minutes
    python benchmarks/rivals_suite.py --repeats 5      # other options of throughput.py, too

The first call installs both into results/programs/overlays/rivals, on top of this environment: all systems use the same
torch. The rest is throughput.py's. torchft and hivemind train in plain loops of torch, as bare local SGD does, and are
compared with bare torch; DDP and A-SGD train in a Trainer, and are compared with "unconnected". hivemind is measured
with two periods: that of the others, and one ten times as long. At the end it prints a table, whose shares stand in
docs/is_it_for_me.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from libraries.overlay import OverlayError, overlay
from rivals import REQUIREMENTS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
IN_A_TRAINER = ("unconnected", "DDP", "A-SGD")
LOOPS = ("bare torch", "bare local SGD", "torchft", "hivemind")
OPTIONS = ("--unconnected", "--bare", "--rivals", "--seconds=10", "--repeats=3", "--systems", *IN_A_TRAINER, *LOOPS)
SLOW = (1, 4)  # times that rank 1 needs for a step
PR_SET_CHILD_SUBREAPER = 36


def cells(runs: dict[str, list[dict[str, Any]]], name: str) -> list[str]:
    """Of one system: samples/s, their share of what its kind reaches without exchanges, exchanges/s of all workers."""
    base = IN_A_TRAINER[0] if name.startswith(IN_A_TRAINER) else LOOPS[0]
    speeds = [run["samples_per_s"] for run in runs[name]]
    shares = [speed / run["samples_per_s"] for speed, run in zip(speeds, runs[base], strict=True)]
    exchanges = [run["exchanges_per_s"] for run in runs[name] if "exchanges_per_s" in run]
    return [
        f"{statistics.median(speeds):.0f} ({min(speeds):.0f} - {max(speeds):.0f})",
        f"{statistics.median(shares):.2f}" if name != base else "",
        f"{statistics.median(exchanges):.1f}" if exchanges and name != base else "",
    ]


def table(scenarios: Sequence[dict[str, list[dict[str, Any]]]]) -> str:
    """The runs of the scenarios as Markdown, a row for each system."""
    heads = ["samples/s", "of those without exchanges", "exchanges/s"]
    rows = [["", *(f"{head}, {what}" for what in ("equal", "one slow") for head in heads)]]
    rows.append(["---"] * len(rows[0]))
    rows += [[name, *(cell for runs in scenarios for cell in cells(runs, name))] for name in scenarios[0]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # hivemind's processes outlive a peer that is killed
    try:
        python = overlay(RESULTS / "programs" / "overlays" / "rivals", REQUIREMENTS)
    except OverlayError as error:
        print(error)
        return 2
    scenarios = []
    try:
        for slow in SLOW:
            file = RESULTS / f"rivals-{slow}.json"
            command = [python, ROOT / "benchmarks" / "throughput.py", *OPTIONS, *sys.argv[1:]]
            done = subprocess.run(
                [*command, f"--slow={slow}", f"--json={file}"],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                check=False,
            )
            if done.returncode:
                return done.returncode
            scenarios.append(json.loads(file.read_text())["scenarios"][0]["runs"])
    finally:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    print(f"\n{table(scenarios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
