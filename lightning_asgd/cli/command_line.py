"""``lightning-asgd``: each command is a function, whose arguments are its options and whose docstring is its help."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_asgd.cli.doctor_command import doctor
from lightning_asgd.core.foundation.errors import ASGDError
from lightning_asgd.data_stalls.command import measure_stalls
from lightning_asgd.elastic.health import health
from lightning_asgd.elastic.serve_command import serve
from lightning_asgd.elastic.status_command import status
from lightning_asgd.plan.command import plan
from lightning_asgd.report.command import report

COMMANDS: dict[str, Callable[..., int | None]] = {
    "doctor": doctor,
    "serve": serve,
    "status": status,
    "health": health,
    "report": report,
    "plan": plan,
    "stalls": measure_stalls,
}
"""Functions by name. A command returns the process's exit code, or None for success."""

_EXAMPLES = {
    "doctor": "lightning-asgd doctor",
    "serve": "lightning-asgd serve 10.0.0.1:29400/my-model",
    "status": "lightning-asgd status 10.0.0.1:29400 --watch",
    "health": "lightning-asgd health 10.0.0.1:29400",
    "report": "lightning-asgd report lightning_logs/version_0 --bundle",
    "plan": "lightning-asgd plan --parameters 25.6e6 --step-s 0.25 --batch-size 32 \\\n"
    "      --link-gbit-s 10 --workers 16",
    "stalls": "lightning-asgd stalls --module train.py:Net",
}
_CLOSING = """
Exit codes: 0 success, 1 an error that the message explains (of doctor: a job
would have problems), 2 a mistake in the options, 130 stopped with Ctrl-C.

Training itself needs no command: Trainer(strategy=ASGDStrategy()).
"""
_WIDTH = 78  # of descriptions


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: its words; None for those of the process.

    Returns:
        the exit code: 1 for an error that the user can fix, which is printed without a traceback.

    Raises:
        SystemExit: with 2 after a mistake in the options, with 0 after ``--help`` and ``--version``.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # closed: sockets and files of children would take its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    warnings.filterwarnings("ignore", ".*LeafSpec")  # of torch, about Lightning's code
    words = [_hyphenated(word) for word in (sys.argv[1:] if argv is None else argv)]
    given = vars(_parser().parse_args(words))
    command = COMMANDS[given.pop("command")]
    try:
        return command(**given) or 0
    except ASGDError as error:
        sys.stderr.write(f"{type(error).__name__}: {_in_options(str(error), command)}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-asgd",
        description="Serve, watch, report on and plan asynchronous training with PyTorch Lightning.",
        epilog="\n  ".join(["examples:", *_EXAMPLES.values()]) + f"\n{_CLOSING}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('lightning-asgd')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, function in COMMANDS.items():
        text, help_of = _documentation(function)
        each = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description="\n\n".join(textwrap.fill(part, _WIDTH) for part in text.split("\n\n")),
            epilog=f"example:\n  {_EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        hints = get_type_hints(function)
        for parameter in inspect.signature(function).parameters.values():
            _add(each, parameter, hints[parameter.name], help_of[parameter.name])
    return parser


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The text of a docstring before its sections, and what it says of each argument."""
    text, _, sections = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
    arguments = sections.partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
    return text, {name: " ".join(about.split()).replace("%", "%%") for name, about in found}


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any, about: str) -> None:
    """Add the option, or the positional argument, that a parameter stands for."""
    required = parameter.default is parameter.empty
    if parameter.kind is not parameter.KEYWORD_ONLY:
        parser.add_argument(parameter.name, help=about)
        return
    option = _option(parameter.name)
    if hint is bool:
        parser.add_argument(option, action="store_true", help=about)
        return
    if get_origin(hint) in (Union, types.UnionType):  # of a type and None
        optional = bool in get_args(hint)  # the option's value
        hint = next(each for each in get_args(hint) if each not in (type(None), bool))
        if optional:
            parser.add_argument(option, nargs="?", const=True, default=False, type=hint, metavar="FILE", help=about)
            return
    if required or parameter.default is not None:
        about += " (required)" if required else " (default: %(default)s)"
    how: dict[str, Any] = {"type": hint, "metavar": {int: "N", float: "X", Path: "PATH"}.get(hint, option[2:].upper())}
    if get_origin(hint) is Literal:
        how = {"choices": get_args(hint)}
    elif get_origin(hint) is list:
        how = {"type": _whole_numbers, "metavar": "N,N,..."}
    parser.add_argument(option, required=required, default=None if required else parameter.default, help=about, **how)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _whole_numbers(text: str) -> list[int]:
    """``32,64,128`` or ``[32,64,128]``."""
    return [int(number) for number in text.strip("[]").split(",")]


_whole_numbers.__name__ = "list of whole numbers"  # for argparse's error


def _hyphenated(word: str) -> str:
    """``--num_servers`` is ``--num-servers``: people also write the names of the arguments in Python."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return f"{_option(name[2:])}{equals}{value}"


def _in_options(text: str, command: Callable[..., Any]) -> str:
    """An error's text with ``nsync=0`` as ``--nsync 0``, where that is an option of the command."""
    for name, parameter in inspect.signature(command).parameters.items():
        typed = _option(name) if parameter.kind is parameter.KEYWORD_ONLY else name
        text = re.sub(rf"(?<![\w.(]){name}=(?=\S)", f"{typed} ", text)
    return text
