"""Tables and numbers in a terminal, or in a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_asgd.core.foundation.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 80  # columns of output that goes into a file


def console() -> Console:
    """Where to print. Raises a ``ConfigurationError`` if rich is missing."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise ConfigurationError("Tables need rich: pip install rich.") from error
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=_WIDTH)


def table(title: str, *headings: str) -> Table:
    """A table without lines between its rows; columns with a heading are of numbers."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for heading in headings:
        made.add_column(heading, justify="right" if heading else "left")
    made.show_header = any(headings)
    return made


def in_bytes(count: float) -> str:
    """Bytes in the unit that fits: ``"102 MB"``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def in_seconds(seconds: float) -> str:
    """Seconds or milliseconds: ``"2.5 s"``, ``"250 ms"``."""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"
