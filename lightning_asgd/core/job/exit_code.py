"""A script of several ranks ends with an error when a worker that it has started did, after the fit for instance.

Python offers no way to change the exit code once it ends, so :func:`exit_with` ends the process itself, at the last
moment: when modules are cleared, after all functions of ``atexit`` and after the standard streams were flushed.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from lightning_asgd.core.foundation.process_name import machine_and_pid

log = logging.getLogger(__name__)

_WAIT_S = 30.0
_PATIENCE_S = 3.0  # before the first log line
_POLL_S = 0.05


def excuse_of(pid: int) -> str:
    """The rendezvous key under which a worker that fails in a fit notes whether that is no failure of the script."""
    return f"excuse/{machine_and_pid(pid)}"


def failures(workers: Mapping[int, subprocess.Popen[bytes]], wait_s: float = _WAIT_S) -> dict[int, int]:
    """Wait for workers to end, and return the exit codes of those that failed; one still running counts as killed."""
    begun = time.monotonic()
    told = False
    while running := [f"{rank} (process {p.pid})" for rank, p in workers.items() if p.poll() is None]:
        waited_s = time.monotonic() - begun
        if waited_s > wait_s:
            log.warning("Worker %s is still running after %g s. It is killed.", ", ".join(running), wait_s)
            break
        if waited_s > _PATIENCE_S and not told:
            told = True
            log.warning("Waiting for worker %s to exit...", ", ".join(running))
        time.sleep(_POLL_S)
    codes = {rank: -signal.SIGKILL if (code := p.poll()) is None else code for rank, p in workers.items()}
    return {rank: code for rank, code in codes.items() if code}


def is_failing() -> bool:
    """Whether this process ends because of an exception, which gives it an exit code of its own."""
    return hasattr(sys, "last_exc") or hasattr(sys, "last_type")  # Python sets these when it prints the traceback


def exit_with(failed: Mapping[int, int]) -> None:
    """Let this process, which is ending, have the exit code of the first worker that has failed."""
    code = next(iter(failed.values()))
    code = code if code > 0 else 128 - code  # as a shell shows a signal
    global _last
    _last = _Last(code)
    for rank, each in failed.items():
        log.error(
            "Worker %d ended with exit code %d. It was refused, or no fit continued without it: this process ends with "
            "exit code %d. See the worker's output.",
            rank,
            each,
            code,
        )


class _Last:
    """Ends the process when Python forgets it."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __del__(self, exit_now: object = os._exit) -> None:
        exit_now(self._code)  # type: ignore[operator]


_last: _Last | None = None
