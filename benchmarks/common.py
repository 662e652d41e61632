"""What the programs here have in common: how they begin and end, and how they print a verdict and a median."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from network import available
from ranks import clean_environment, told_of_errors
from rich.console import Console
from rich.markup import escape

CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
# Options of a Trainer that writes and prints nothing.
BARE: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
SECRET = "LIGHTNING_ASGD_SECRET"


@contextlib.contextmanager
def prepared(*, one_thread: bool = False, secret: bool = False, machines: bool = False) -> Iterator[None]:
    """Do the work of a program, without what a launcher has set. An error becomes a line, and exit code 1.

    Args:
        one_thread: whether torch computes with one thread, here and in processes that are forked.
        secret: whether its processes share one, which RPC ignores and ZeroMQ needs.
        machines: whether it needs network namespaces. Without them the program ends with exit code 2.
    """
    clean_environment()
    if secret:
        os.environ[SECRET] = secrets.token_hex(32)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    if one_thread:
        import torch

        torch.set_num_threads(1)
    if machines and (reason := available()) is not None:
        CONSOLE.print(f"[red]Cannot make machines.[/] {escape(reason)}")
        sys.exit(2)
    with told_of_errors(CONSOLE):
        yield


def verdict(fine: bool, text: str) -> bool:
    """Print a line that begins with PASS or FAIL."""
    CONSOLE.print(f"{'[green]PASS[/]' if fine else '[red]FAIL[/]'}  {escape(text)}")
    return bool(fine)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, with the minimum and the maximum; empty without values."""
    if not values:
        return ""
    median, low, high = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
    return f"{median} ({low}-{high})"
