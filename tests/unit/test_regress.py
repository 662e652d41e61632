"""What make regress says of given figures. The measuring itself is a benchmark."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # its programs import each other as scripts do

import regress  # noqa: E402


def test_ratios_are_of_the_same_repeat_and_more_is_better() -> None:
    assert regress.compare([100, 200, 400], [110, 100, 400]).ratios == (1.1, 0.5, 1.0)
    assert regress.compare([100, 200], [200, 100], more_is_better=False).ratios == (0.5, 2.0)
    assert regress.compare([100, 200, 400], [110, 100, 400]).median == 1.0


def test_the_interval_is_students_over_the_logarithms() -> None:
    """Logarithms -0.1, 0, 0.1: mean 0, standard error 0.1 / sqrt(3), and 4.3027 of them to each side."""
    compared = regress.compare([1, 1, 1], [math.exp(-0.1), 1, math.exp(0.1)])
    low, high = compared.interval
    assert math.log(high) == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)
    assert math.log(low) == pytest.approx(-math.log(high))


@pytest.mark.parametrize(
    ("new", "worse"),
    [
        ([90, 90.5, 91, 90.2, 90.4], True),
        ([96.9, 96.9, 96.9, 96.9, 96.9], True),  # the limit is 0.97
        ([97.1, 97.1, 97.1, 97.1, 97.1], False),
        ([70, 110, 95, 80, 120], False),  # too noisy to tell
        ([120, 121, 119, 120, 120], False),
        ([50], False),  # one repeat says nothing
    ],
)
def test_worse_is_only_what_is_so_for_certain(new: list[float], worse: bool) -> None:
    assert regress.compare([100] * len(new), new).worse is worse


def test_another_commit_is_checked_out_beside_and_removed() -> None:
    if not (BENCHMARKS.parent / ".git").exists():
        pytest.skip("no repository")
    with regress.checked_out("HEAD") as tree:
        assert (tree / "lightning_asgd" / "__init__.py").exists()
    assert not tree.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert str(tree) not in listed.stdout


def test_an_unknown_commit_is_named() -> None:
    if not (BENCHMARKS.parent / ".git").exists():
        pytest.skip("no repository")
    with pytest.raises(RuntimeError, match="no-such-commit"), regress.checked_out("no-such-commit"):
        pass
