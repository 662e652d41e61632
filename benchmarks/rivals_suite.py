"""Samples per second of torchft and hivemind beside DDP, local SGD and A-SGD: equal workers, and one 4 times slower.

    python benchmarks/rivals_suite.py                  # about 15 minutes
    python benchmarks/rivals_suite.py --repeats 5      # other options of throughput.py, too

The first call installs both into results/programs/overlays/rivals, on top of this environment: all systems use the same
torch. The rest is throughput.py's. torchft and hivemind train in plain loops of torch, as bare local SGD does, and are
to be compared with bare torch; DDP and A-SGD train in a Trainer, and are to be compared with "unconnected". hivemind is
measured with two periods: that of the others, and one ten times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import rivals_hivemind
import rivals_torchft
from libraries.overlay import OverlayError, overlay

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "results" / "programs" / "overlays" / "rivals"
REQUIREMENTS = (rivals_torchft.REQUIREMENT, rivals_hivemind.REQUIREMENT)
SYSTEMS = ("unconnected", "DDP", "A-SGD", "bare torch", "bare local SGD", "torchft", "hivemind")
OPTIONS = ("--unconnected", "--bare", "--rivals", "--seconds=10", "--repeats=3", "--systems", *SYSTEMS)
PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # hivemind's processes outlive a peer that is killed
    try:
        python = overlay(FOLDER, REQUIREMENTS)
    except OverlayError as error:
        print(error)
        return 2
    code = 0
    try:
        for slow in (1, 4):
            command = [python, ROOT / "benchmarks" / "throughput.py", *OPTIONS, f"--slow={slow}", *sys.argv[1:]]
            done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
            code = code or done.returncode
    finally:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return code


if __name__ == "__main__":
    sys.exit(main())
