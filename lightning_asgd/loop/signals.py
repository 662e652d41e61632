"""Ctrl-C and SIGTERM in a plain loop: a worker leaves between two batches, so that nothing is half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["TERMINATED", "Interruptions"]

TERMINATED = 128 + signal.SIGTERM  # the exit code, as a shell would report it


class Interruptions:
    """Handles the first Ctrl-C and SIGTERM of this process, if it runs in the main thread.

    While :attr:`defers` is set a signal is kept until :meth:`raise_now`; else it is raised at once, as is a second one:
    Ctrl-C as :class:`KeyboardInterrupt`, SIGTERM as :class:`SystemExit`, so that a program's ``finally`` blocks run. A
    program's own handlers are left alone.
    """

    def __init__(self) -> None:
        self.defers = False
        self.raised: int | None = None
        """The signal whose exception was raised last."""
        self._came: int | None = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is default:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        again, self._came = self._came is not None, number
        if again or not self.defers:
            self.raise_now()

    def raise_now(self) -> None:
        """Raise the exception of a signal that has come; defer none until :attr:`defers` is set again."""
        came, self._came, self.defers = self._came, None, False
        self.raised = came or self.raised
        if came == signal.SIGINT:
            raise KeyboardInterrupt
        if came is not None:
            raise SystemExit(TERMINATED)

    def close(self) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
