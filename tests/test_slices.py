"""Which slice may import which, as docs/architecture.md says; and figures that may only fall.

``tests/data/debts.txt`` lists the features' modules that the core still imports.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lightning_asgd import features, protocol
from tests.helpers.ratchet import complaints
from tests.house import CODE, CORE, ROWS, SLICE, features_imported_by_core, measures, slice_of
from tests.test_architecture import FILES, TREES, imported_modules

DEBTS = Path(__file__).parent / "data" / "debts.txt"
# What is above its goal today. The goals are in tests/house.py.
FIGURES: dict[str, int] = {
    "imports of features by the core": 40,
    "code lines of the core": 13952,
    "code lines of the largest feature": 2008,
    "code lines of the library": 35215,
    "files of the library": 336,
    "modules that ASGDStrategy loads": 189,
    "modules that a server loads": 71,
    "branches of 6 central files": 294,
    "lines of a class": 411,
    "methods of a class": 42,
    "attributes of a class": 34,
    "assignments with three or more targets": 224,
    "fields of Exchange": 21,
    "fields of Reply": 14,
    "fields of LeaseRequest": 17,
    "Any in signatures of the core": 590,
    "type: ignore": 79,
    "lines of the tests": 55755,
    "files of the benchmarks": 115,
    "lines of the benchmarks": 22210,
}


def test_the_page_lists_every_slice() -> None:
    assert set(map(slice_of, FILES)) - {"", CORE, "transports", "tables"} == set(ROWS)


def test_what_lies_directly_in_the_package_are_public_paths() -> None:
    for module in {each for each in FILES if not slice_of(each)} - {"__init__", "features", "messages", "protocol"}:
        assert all(isinstance(node, ast.ImportFrom) for node in TREES[module].body), module


@pytest.mark.parametrize("name", ROWS)
def test_a_slice_imports_what_its_row_says_and_no_less(name: str) -> None:
    modules = [module for module in SLICE if SLICE[module] == name]
    imported = {SLICE[other] for module in modules for other in imported_modules(module) if other in SLICE} - {name}
    core = {other for other in imported if other.partition("/")[0] == CORE}
    assert (core if name.partition("/")[0] == CORE else imported - core) == ROWS[name][0]


@pytest.mark.parametrize("name", ROWS)
def test_a_slice_keeps_to_its_lines_of_code(name: str) -> None:
    found = sum(CODE[module] for module in SLICE if SLICE[module] == name)
    assert found <= ROWS[name][1], f"{name} has {found} lines of code. A larger number needs a smaller one elsewhere."


def test_what_features_add_is_there() -> None:
    for feature, names in features.MESSAGES.items():
        assert list(names) == features.load(f"{feature}.messages:__all__")
    for table in (features.FINDERS, features.SERVER, features.STORES, features.SYNCHRONIZERS):
        assert all(callable(features.load(path)) for path in table.values())
    assert not [module for module in FILES if 'load("' in FILES[module].read_text()], "features.py names them all"
    for name in features.SERVER:
        assert name in protocol.__all__ or features.sendable(name).__name__ == name


def test_the_core_imports_no_feature_beyond_the_debts() -> None:
    found = {f"{module} -> {feature}" for module, feature in features_imported_by_core()}
    listed = set(DEBTS.read_text().splitlines())
    assert not found - listed, "the core imports no feature: a feature registers itself (docs/architecture.md)"
    assert not listed - found, "these debts are paid: remove them from tests/data/debts.txt"


def test_figures_only_fall() -> None:
    said = []
    for what, figure, goal in measures():
        name = what.partition(", ")[0]
        recorded = {name: FIGURES[name]} if name in FIGURES else {}
        found = {name: figure} if recorded or figure > goal else {}
        slack = 100 if "lines of the" in name else 0
        said += complaints(found, recorded, goal, "FIGURES in tests/test_slices.py", "", slack)
    assert not said, "\n" + "\n".join(said)
