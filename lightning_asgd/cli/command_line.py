"""``lightning-asgd``: what its words and options are follows from the signatures and docstrings of the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import signature
from itertools import chain, zip_longest
from typing import Any

from lightning_asgd.cli.plan_command import plan
from lightning_asgd.cli.report_command import report
from lightning_asgd.cli.serve_command import serve
from lightning_asgd.cli.stalls_command import measure_stalls
from lightning_asgd.cli.status_command import status
from lightning_asgd.errors import ASGDError

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, Any] = {"serve": serve, "status": status, "report": report, "plan": plan, "stalls": measure_stalls}
"""Functions by name. A command returns the process's exit code, or None for success."""

_PARAMETERS = chain.from_iterable(signature(command).parameters.values() for command in COMMANDS.values())
_SWITCHES = {f"--{parameter.name}" for parameter in _PARAMETERS if isinstance(parameter.default, bool)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: its words; None for those of the process.

    Returns:
        the exit code: 1 for an error that the user can fix, which is printed without a traceback.
    """
    try:
        from jsonargparse import auto_cli
    except ImportError:
        _say("lightning-asgd needs jsonargparse and rich: pip install 'lightning-asgd[cli]'")
        return 1
    words = [_underscored(word) for word in (sys.argv[1:] if argv is None else argv)]
    words = [_valued(word, after) for word, after in zip_longest(words, words[1:], fillvalue="--")]
    try:
        return auto_cli(COMMANDS, args=words, prog="lightning-asgd", description=__doc__) or 0
    except ASGDError as error:
        _say(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _underscored(word: str) -> str:
    """``--run-id`` is ``--run_id``: options are named as arguments in Python, and people write either."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def _valued(word: str, after: str) -> str:
    """``--watch`` is ``--watch=true`` where no value comes after it."""
    return f"{word}=true" if word in _SWITCHES and after.lower() not in ("true", "false") else word


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
