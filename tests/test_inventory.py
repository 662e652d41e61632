"""What users name: none of it may vanish unnoticed. tests/data/inventory.json lists it, one name per line.

Public names are those of the documented modules, with their parameters, as ``ASGDStrategy(nsync=10)``, and attributes,
as ``ASGDStrategy.stats``. What is new is only to be recorded: python -m tests.test_inventory. That drops nothing: what
is taken away on purpose is deleted from the file by hand, in the commit that says why.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import re
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

import pytest

from lightning_asgd.core.lightning.class_trees import Extension
from tests.test_architecture import PACKAGE, TREES, strings_outside_docstrings

RECORDED = Path(__file__).parent / "data" / "inventory.json"

DOCUMENTED = (
    *("", "algorithms", "algorithms.asgd", "algorithms.averaging", "algorithms.base", "algorithms.dana"),
    *("algorithms.diloco", "algorithms.downpour", "algorithms.elastic", "algorithms.hogwild", "algorithms.layerwise"),
    *("algorithms.rounds", "algorithms.sgmcmc", "algorithms.staleness", "compression", "config", "data_stalls.probe"),
    *("data_stalls.stalls", "errors", "optim", "simulation", "sizing", "stats", "timing"),
)


def public_names() -> Iterator[str]:
    described = set()
    for name in DOCUMENTED:
        module = importlib.import_module(f"{PACKAGE}.{name}".rstrip("."))
        for public in module.__all__:
            value, path = getattr(module, public), f"{module.__name__}.{public}"
            yield path
            if not callable(value) or value in described:
                continue
            described.add(value)
            if inspect.isclass(value) and issubclass(value, Enum):
                yield from (f"{path}.{each}" for each in value.__members__)
                continue
            with contextlib.suppress(ValueError, TypeError):  # it has no signature
                yield from (f"{path}({with_default(p)})" for p in inspect.signature(value).parameters.values())
            if inspect.isclass(value):
                yield from (f"{path}.{attribute}" for attribute in attributes(value))


def with_default(parameter: inspect.Parameter) -> str:
    default = parameter.default
    return (
        f"{parameter.name}={default!r}"
        if isinstance(default, bool | int | float | str | type(None))
        else parameter.name
    )


def attributes(cls: type) -> Iterator[str]:
    """Those that the docstring lists, and all public ones where Lightning is not the one who calls methods."""
    for each in cls.__mro__:
        if each.__module__.startswith(PACKAGE):
            listed = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", inspect.getdoc(each) or "", re.MULTILINE)
            yield from re.findall(r"^    (\w+):", listed[1] if listed else "", re.MULTILINE)
            if not issubclass(cls, Extension):
                yield from (name for name in (*vars(each), *inspect.get_annotations(each)) if name[0] != "_")


def command_line() -> Iterator[str]:
    from lightning_asgd.cli.command_line import COMMANDS, main

    pytest.importorskip("rich")
    for command in COMMANDS:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
            main([command, "--help"])
        yield command
        yield from (f"{command} {option}" for option in re.findall(r"(?<![\w-])--?[a-z][\w.-]*", text.getvalue()))


def metrics() -> Iterator[str]:
    from lightning_asgd.monitor.metric_definitions import METRICS

    yield from METRICS
    for tree in TREES.values():  # a metric's name in an f-string ends where a value begins
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"^(?:asgd|stall)/[\w/]*$|^workers/\w+$", node.value)


def environment_variables() -> Iterator[str]:
    for module in TREES:
        for text in strings_outside_docstrings(module):
            yield from re.findall(r"^LIGHTNING_ASGD_\w+$", text)


KINDS: dict[str, Callable[[], Iterator[str]]] = {
    "public names": public_names,
    "commands and options": command_line,
    "metrics": metrics,
    "environment variables": environment_variables,
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_users_name_has_vanished(kind: str) -> None:
    recorded, found = set(json.loads(RECORDED.read_text())[kind]), set(KINDS[kind]())
    if recorded - found:
        pytest.fail(f"{kind} that have vanished: {sorted(recorded - found)}")
    if found - recorded:
        pytest.fail(f"{kind} to be recorded with python -m tests.test_inventory: {sorted(found - recorded)}")


if __name__ == "__main__":
    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    found = {kind: sorted({*before.get(kind, ()), *names()}) for kind, names in KINDS.items()}
    RECORDED.write_text(json.dumps(found, indent=0) + "\n")
