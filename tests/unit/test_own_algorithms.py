"""Algorithms that users write: how long the one of the how-to page is, and which classes servers could not import."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import lightning_asgd
from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import ASGD, Algorithm, Transform
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.server.process import ServerArguments, ServerSettings

RULE = Path(lightning_asgd.__file__).parents[1] / "examples" / "own_algorithm" / "clipped_downpour.py"


@dataclass(frozen=True)
class Importable(Transform):
    """In a module that servers can import."""


def test_the_rule_of_the_page_has_at_most_60_lines() -> None:
    assert len(RULE.read_text().splitlines()) <= 60


def test_a_class_in_a_module_is_accepted() -> None:
    ASGDStrategy(algorithm=ASGD(transforms=[Importable()]))


def test_a_class_in_a_function_is_refused() -> None:
    @dataclass(frozen=True)
    class Inner(Algorithm):
        pass

    with pytest.raises(ConfigurationError, match=r"Inner is defined in a function of .*test_own_algorithms\. Expected"):
        ASGDStrategy(algorithm=Inner())


@pytest.mark.parametrize("as_transform", [False, True])
def test_a_class_in_the_script_is_refused(as_transform: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Importable if as_transform else type("Rule", (Algorithm,), {})
    monkeypatch.setattr(kind, "__module__", "__main__")
    rule = ASGD(transforms=[Importable()]) if as_transform else kind()
    with pytest.raises(
        ConfigurationError, match=r"is defined in the script that is run\. Expected a class in a module"
    ):
        ASGDStrategy(algorithm=rule)


def test_servers_are_told_where_to_look_for_modules() -> None:
    arguments = ServerArguments(ServerSettings(), "server0", "key", "127.0.0.1", 1, 1, path=("a", "b"))
    assert ServerArguments.from_json(arguments.to_json()).path == ("a", "b")
    assert "a" not in sys.path
