"""Files beside the code, which people and the forge read, agree with the project."""

from __future__ import annotations

import itertools
import re

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import lightning_asgd
from tests.helpers.project import EXTRAS, ROOT, SETTINGS

VERSION = SETTINGS["project"]["version"]
WORKFLOWS = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_the_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION == lightning_asgd.__version__
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None
    assert latest[1] in (VERSION, "Unreleased")


def test_readme_lists_the_extras() -> None:
    listed = re.search(r"Extras: (.*)\.$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert listed is not None
    assert sorted(re.findall(r"`(\w+)`", listed[1])) == sorted(EXTRAS)


def test_the_makefile_installs_all_extras() -> None:
    installed = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert installed is not None
    assert sorted(installed[1].split(",")) == sorted(EXTRAS)


def test_make_oldest_installs_the_lower_bounds() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    needs = map(Requirement, [*SETTINGS["project"]["dependencies"], *itertools.chain(*EXTRAS.values())])
    bounds = [(need.name, bound.version) for need in needs for bound in need.specifier if bound.operator == ">="]
    assert bounds
    assert not [(name, least) for name, least in bounds if Version(pins[name]) != Version(least)]


def targets_called() -> set[str]:
    """The targets of the Makefile that the workflows call."""
    called = {word for text in WORKFLOWS.values() for word in re.findall(r"run: make (\w+)", text)}
    matrix = yaml.safe_load(WORKFLOWS["ci.yml"])["jobs"]["make"]["strategy"]["matrix"]
    return called | {row["target"] for row in matrix["include"]}


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"test", "oldest", "newest", "wheels", "docs", "dist"} <= targets_called() <= targets


def test_ci_runs_the_oldest_and_the_newest_python() -> None:
    rows = yaml.safe_load(WORKFLOWS["ci.yml"])["jobs"]["make"]["strategy"]["matrix"]["include"]
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(SETTINGS["project"]["classifiers"]))
    assert SETTINGS["project"]["requires-python"] == f">={classifiers[0]}"
    tested = {row["python"] for row in rows if row["target"] == "test"}
    assert {classifiers[0], classifiers[-1]} <= tested <= {*classifiers}


def test_a_bug_report_asks_for_the_output_of_doctor() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    doctor = next(field for field in form["body"] if field.get("id") == "doctor")
    assert "lightning-asgd doctor" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]
