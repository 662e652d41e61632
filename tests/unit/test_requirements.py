"""What the package requires, and the releases of Lightning that it refuses."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
from packaging.requirements import Requirement

from benchmarks import wheels
from lightning_asgd import ASGDStrategy
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.class_trees import MALICIOUS
from tests.helpers.project import EXTRAS

ROOT = Path(__file__).parents[2]


def requirements_of_lightning() -> list[Requirement]:
    """Those in pyproject.toml, whatever list they are in."""
    strings = re.findall(r'^ *"([^"]+)",', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return [Requirement(s) for s in strings if re.match(r"(pytorch-)?lightning\b(?!-)", s)]


def test_no_requirement_is_met_by_a_malicious_release() -> None:
    found = requirements_of_lightning()
    assert {requirement.name for requirement in found} == {"pytorch-lightning", "lightning"}
    assert MALICIOUS == ("2.6.2", "2.6.3")
    for requirement in found:
        assert requirement.specifier.contains("2.6.1")
        assert requirement.specifier.contains("2.6.4")
        assert not [version for version in MALICIOUS if requirement.specifier.contains(version)], str(requirement)


def test_each_extra_is_tried_in_an_empty_environment() -> None:
    assert {"", *EXTRAS} == {*wheels.EXTRAS}


@pytest.mark.parametrize("version", MALICIOUS)
@pytest.mark.parametrize("tree", [pytorch_lightning, lightning.pytorch])
def test_a_trainer_of_a_malicious_release_is_refused(tree: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[tree.__name__], "__version__", version)
    with pytest.raises(ConfigurationError, match=rf"{version} .*malicious"):
        tree.Trainer(strategy=ASGDStrategy(), accelerator="cpu", devices=1, logger=False)
