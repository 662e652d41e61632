"""A small process that ends a job's other processes once the main process is gone, whatever ended it.

:func:`start` runs ``python -m lightning_asgd.core.job.reaper PARENT``, which reads lines ``add PID STARTED`` and
``remove FOLDER`` from its standard input. When the input ends or the parent is another one, it gives the processes time
to end by themselves, then asks them to, then kills them: all within 8 seconds. Then it removes the folders, except
those before a line ``keep``, which the parent removes. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

# What a terminal or a scheduler sends to a whole job.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

_POLL_S = 0.25
_PATIENCE_S = 3.5  # for processes to end by themselves, and for one of them to write a last checkpoint
_GRACE_S = 2.5  # between SIGTERM and SIGKILL
_KILLED_S = 1.0


def start(env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the reaper of this process; its standard input is a pipe from here."""
    # A child inherits blocked signals. Otherwise a signal before reap() ignores it would end the reaper.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        command = [sys.executable, "-m", "lightning_asgd.core.job.reaper", str(os.getpid())]
        # In a session of its own: a signal to the job's whole process group does not reach it.
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(pid: int) -> str:
    """When a process started, which with its number tells it from all others of this machine.

    In ticks since boot: the time of day of a start moves when the clock is set. Raises a ``psutil.Error`` if the
    process is gone.
    """
    if not psutil.LINUX:
        return str(psutil.Process(pid).create_time())
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # the name may hold anything
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error


def reap() -> int:
    """Watch until the parent is gone, then clean up."""
    parent = int(sys.argv[1])
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    watched: dict[int, str] = {}
    folders: list[str] = []
    buffer = b""
    orphan = False
    while not orphan:
        orphan = os.getppid() != parent  # before reading its last lines: all of them, if this process was slow
        while select.select([0], [], [], 0 if orphan else _POLL_S)[0]:
            data = os.read(0, 65536)
            if not data:
                orphan = True
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                what, _, about = os.fsdecode(line).partition(" ")
                if what == "add":
                    pid, since = about.split()
                    watched[int(pid)] = since
                elif what == "remove":
                    folders.append(about)
                elif what == "keep":
                    folders.clear()
    _end(_alive(watched))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _alive(watched: Mapping[int, str]) -> list[psutil.Process]:
    """The watched processes that still run; a process number that was given to another program does not count."""
    alive = []
    for pid, since in watched.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if started(pid) == since:
                alive += [process, *process.children(recursive=True)]
    return alive


def _end(processes: Iterable[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(list(processes), timeout=_PATIENCE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(alive, timeout=_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=_KILLED_S)  # a process that still writes would create its folder again


if __name__ == "__main__":
    sys.exit(reap())
