"""The core imports no feature, and the library gets smaller. The debts listed here may only shrink.

``tests/data/debts.txt`` lists the features' modules that the core still imports.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.ratchet import complaints
from tests.house import features_imported_by_core, measures

DEBTS = Path(__file__).parent / "data" / "debts.txt"
# What is above its goal today. The goals are in tests/house.py.
FIGURES: dict[str, int] = {
    "imports of features by the core": 127,
    "code lines of the core": 14296,
    "code lines of the largest feature": 2006,
    "code lines of the library": 35412,
    "files of the library": 316,
    "modules that ASGDStrategy loads": 243,
    "modules that a server loads": 107,
    "branches of 6 central files": 320,
    "lines of a class": 411,
    "methods of a class": 42,
    "attributes of a class": 34,
    "assignments with three or more targets": 224,
    "fields of Exchange": 21,
    "fields of Reply": 14,
    "fields of LeaseRequest": 17,
    "Any in signatures of the core": 608,
    "type: ignore": 79,
    "lines of the tests": 55826,
    "files of the benchmarks": 120,
    "lines of the benchmarks": 23997,
}


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
