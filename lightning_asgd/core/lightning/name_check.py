"""Checks, before a fit begins, that the installed Lightning has the names that this package uses."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.private_names import (
    ALTERNATIVES,
    BELOW,
    LATEST,
    LEASES,
    NAMES,
    OLDEST,
    SIGNATURE,
    Name,
    import_from,
    script_launcher,
)


def check_tree(tree: Any, warn: Callable[[str], None]) -> None:
    """Raise one error that lists all modules, classes and signatures that a tree lacks; warn of optional ones."""
    names = [name for name in NAMES if name.module]
    if tree.package == tree.fabric:
        names = [name for name in names if name.path.startswith(("fabric.", script_launcher.path))]
    _judge(tree, [(name, _lacking(tree, name, None)) for name in names], warn)


def check_trainer(tree: Any, trainer: Any, warn: Callable[[str], None], *, leases: bool) -> None:
    """The same for the parts of a Trainer. Names that only leases need may be missing if the data are not leased."""
    names = [name for name in NAMES if not name.module and (leases or name.used_for != LEASES)]
    _judge(tree, [(name, _lacking(tree, name, trainer)) for name in names], warn)


def _judge(tree: Any, found: Iterable[tuple[Name, str]], warn: Callable[[str], None]) -> None:
    missing = [(name, lacks) for name, lacks in found if lacks and _number(name.since) <= _number(tree.version)]
    for name, lacks in missing:
        if name.otherwise:
            warn(f"{tree.package} {tree.version} lacks {_described(name, lacks)}: {name.otherwise}.")
    needed = [(name, lacks) for name, lacks in missing if not name.otherwise]
    if needed:
        what = ", ".join(_described(name, lacks) for name, lacks in needed)
        settings = {ALTERNATIVES.get(name.used_for, "") for name, _ in needed}
        instead = f" or {min(settings)}" if all(settings) else ""
        raise ConfigurationError(
            f"{tree.package} {tree.version} lacks {what}. Install {tree.distribution}>={OLDEST},<{BELOW}{instead}."
        )


def _described(name: Name, lacks: str) -> str:
    return f"`{lacks}` (present {name.since} to {LATEST}; needed to {name.used_for})"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _lacking(tree: Any, name: Name, trainer: Any) -> str:
    """The first part of a name that is missing, with its owner; empty if nothing is missing."""
    try:
        found = import_from(tree, name.module) if name.module else trainer
    except ImportError:
        return f"{name.module}.{name.parts[0]}"
    for part in name.parts:
        attribute, _, arguments = part.partition("(")
        if not _has(found, attribute):
            owner = found if inspect.isclass(found) else type(found)
            return f"{name.module if inspect.ismodule(found) else owner.__name__}.{attribute}"
        if part != name.parts[-1] or name.kind == SIGNATURE:
            found = getattr(found, attribute)
        if arguments:
            try:
                found = found(*ast.literal_eval(f"[{arguments[:-1]}]"))
            except ImportError:  # the progress bar's library is not installed, so no Trainer has that bar
                return ""
    given = [each for each in inspect.signature(found).parameters if each != "self"] if name.kind == SIGNATURE else []
    relied_upon = name.parameters
    return "" if given[: len(relied_upon)] == relied_upon else f"{'.'.join(name.parts)}({', '.join(relied_upon)})"


def _has(owner: Any, attribute: str) -> bool:
    try:
        inspect.getattr_static(owner, attribute)
    except AttributeError:
        return False
    return True
