"""Ctrl-C, SIGTERM, SLURM's SIGUSR1: a program ends where nothing is half done, and says so in a line.

In a plain loop that is between two batches. Ray's driver and islands use parts of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

from lightning_asgd.core.foundation.errors import ServerLostError, WorkerLostError

TERMINATED = 128 + signal.SIGTERM  # the exit code, as a shell would report it
TIME_IS_UP = 128 + signal.SIGUSR1  # before the time limit of a SLURM job


def raised_by(number: int) -> BaseException:
    """What a signal raises: :class:`KeyboardInterrupt` for Ctrl-C, else :class:`SystemExit`."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


@contextlib.contextmanager
def ignoring_children() -> Iterator[None]:
    """Ignore the ends of child processes: torch's handler raises if a loader was killed, and would cut a report off."""
    handles = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if handles else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGCHLD, before)


def end_briefly(error: BaseException) -> None:
    """Have an error end the program with its last line only, as a WorkerLostError does: its cause is elsewhere."""
    error._lightning_asgd_brief = True  # type: ignore[attr-defined]
    _install()


def _install() -> None:
    """Set the hook, and never remove it: Python calls it after the program has left its loop."""
    if getattr(sys.excepthook, "func", None) is not _show:
        sys.excepthook = partial(_show, sys.excepthook)


def is_brief(error: BaseException | None) -> bool:
    """Whether an error is shown without its traceback; not if another one came before it."""
    first = error is not None and (error.__context__ is None or error.__suppress_context__)
    return first and (isinstance(error, ServerLostError | WorkerLostError) or hasattr(error, "_lightning_asgd_brief"))


def _show(before: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if is_brief(error):
        error.__cause__ = trace = None
        error.__suppress_context__ = True
        error = error.with_traceback(None)
    before(kind, error, trace)


class Interruptions:
    """Handles the first Ctrl-C and SIGTERM of this process, and SIGUSR1 under SLURM, if it runs in the main thread.

    While :attr:`defers` is set a signal is kept until :meth:`raise_now`; else it is raised at once, as is a second one,
    as an exception, so that a program's ``finally`` blocks run; see :func:`raised_by`. One SIGTERM is ignored after
    SIGUSR1, since SLURM sends both, and one after :meth:`leave`. A program's own handlers are left alone, but for those
    of the module that it ``replaces``. From then on a lost server or worker ends the program with one line.
    """

    def __init__(self, *, replaces: str = "") -> None:
        self.defers = False
        self.raised: int | None = None
        """The signal whose exception was raised last."""
        self._came: int | None = None
        self._ignores = False  # whether the next SIGTERM is ignored
        self._before: dict[int, Any] = {}
        _install()
        if threading.current_thread() is not threading.main_thread():
            return
        defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        if "SLURM_JOB_ID" in os.environ:
            defaults[signal.SIGUSR1] = signal.SIG_DFL
        for number, default in defaults.items():
            handler = signal.getsignal(number)
            if handler is default or (replaces and getattr(handler, "__module__", "") == replaces):
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM and self._ignores:
            self._ignores = False
            return
        again, self._came = self._came is not None, number
        self._ignores = number == signal.SIGUSR1  # SLURM also sends SIGTERM to a job that is requeued
        if again or not self.defers:
            self.raise_now(brief=False)  # the traceback tells where the program was

    @property
    def came(self) -> bool:
        """Whether a signal is pending."""
        return self._came is not None

    def raise_now(self, *, brief: bool = True) -> None:
        """Raise the exception of a signal that has come; defer none until :attr:`defers` is set again."""
        came, self._came, self.defers = self._came, None, False
        self.raised = came or self.raised
        if came is not None:
            error = raised_by(came)
            if brief:
                end_briefly(error)
            raise error

    def leave(self) -> None:
        """The worker leaves after an interruption: ignore one SIGTERM, so that its last push is whole."""
        self._ignores = True

    def close(self) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
