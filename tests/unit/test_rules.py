"""What make rules says of given losses. The training is a benchmark."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401 - sets environment variables when it is imported, which a test must not
from matplotlib import pyplot
from matplotlib.figure import Figure


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # it sets this for itself
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))  # its programs import each other
    return importlib.import_module("rules")


def entry(rule: str, name: str, seed: int, loss: float, made_with: str = "") -> dict[str, Any]:
    about = {"rule": rule, "set": name, "seed": seed, "loss": loss, "training_loss": loss, "accuracy": 0.9}
    return {**about, "made_with": made_with, "epochs": importlib.import_module("rules").SETS[name].epochs}


def found_of(losses: dict[str, list[float]], name: str = "text") -> dict[Any, Any]:
    return {(r, name, n): entry(r, name, n, loss) for r, each in losses.items() for n, loss in enumerate(each, 1)}


def test_a_rule_that_the_package_lacks_has_no_row(rules: Any) -> None:
    assert not rules.Rule("NoSuchRule").exists
    assert all(rules.Rule(name).exists for name in ("DDP", "LocalSGD", "ASGD", "SparseLoCo"))


def test_rows_have_different_names(rules: Any) -> None:
    names = [str(rule) for rule in rules.RULES]
    assert len(set(names)) == len(names)
    assert set(rules.BASES) <= set(names)
    assert all(rule.excused.keys() <= rules.SETS.keys() for rule in rules.RULES)


def test_ratios_are_of_the_same_seed(rules: Any) -> None:
    found = found_of({"DDP": [1.0, 2.0], "ASGD": [1.1, 2.0, 9.0]})
    assert rules.ratios(found, "text", "ASGD", "DDP") == [1.1, 1.0]
    assert rules.ratios(found, "digits", "ASGD", "DDP") == []


@pytest.mark.parametrize(
    ("beside", "good"),
    [([1.0, 1.009, 1.5], True), ([0.5], True), ([1.0, 1.011, 1.012], False), ([math.inf], False), ([], None)],
)
def test_the_median_is_within_one_per_cent(rules: Any, beside: list[float], good: bool | None) -> None:
    assert rules.within(rules.Rule("ASGD"), "text", beside) is good
    assert rules.within(rules.Rule("ASGD", excused={"text": "Why."}), "text", beside) is None
    assert rules.within(rules.Rule("DDP", other_order=True), "text", beside) is None


def test_a_rule_that_is_not_meant_to_be_so_good_does_not_fail_the_table(
    rules: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = found_of({"DDP": [1.0], "ASGD": [1.2]})
    meant, excused = rules.Rule("ASGD"), rules.Rule("ASGD", excused={"text": "A reason that is given."})
    assert not rules.show(found, [rules.Rule("DDP"), meant], "text")
    assert "FAIL" in capsys.readouterr().out
    assert rules.show(found, [rules.Rule("DDP"), excused], "text")
    assert "A reason that is given." in capsys.readouterr().out


def test_runs_count_while_the_code_is_the_same(rules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "version", lambda *, package: "now" if package else "")
    file = tmp_path / "rules.json"
    assert rules.known(file) == {}
    entries = [entry("DDP", "text", 1, 1.0), entry("ASGD", "text", 1, 1.0, "before")]
    entries.append(entry("ASGD", "text", 2, 1.0, "now"))
    entries.append({**entry("DDP", "text", 3, 1.0), "epochs": 99})
    file.write_text(json.dumps(entries))
    assert list(rules.known(file)) == [("DDP", "text", 1), ("ASGD", "text", 2)]


def test_the_picture_has_a_dot_for_every_seed(rules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_of({"DDP": [1.0, 1.0], "ASGD": [1.02, math.inf]}) | found_of({"DDP": [0.1, 0.1]}, "digits")
    drawn: list[Figure] = []
    with pyplot.rc_context():
        with monkeypatch.context() as patch:
            patch.setattr(pyplot, "close", drawn.append)
            rules.draw(found, [rules.Rule("DDP"), rules.Rule("ASGD")], ["text", "digits"], tmp_path / "rules.png")
        (figure,) = drawn
        dots = [len(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "o"]
        pyplot.close(figure)
    assert dots == [2, 2]
    assert (tmp_path / "rules.png").exists()
