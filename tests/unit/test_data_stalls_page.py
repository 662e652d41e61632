from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lightning_asgd.cli.command_line import main
from tests.helpers import pages

PAGE = pages.DOCS / "data_stalls.md"


def words(text: str) -> list[str]:
    """What stands there but for figures: a rate may be too fast to be measured."""
    return re.findall(r"[a-z]{3,}", re.sub(r"\d+(\.\d+)? m?s\b|no limit seen", "", text))


def shape(text: str) -> list[str]:
    """The words of the tables, without the advice."""
    tables, verdict, _ = text.partition("Data loading takes ")
    assert verdict
    return words(tables)


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(r"```\n\$ lightning-asgd (stalls .*?)\n(.*?)\n\.\.\.\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    hidden, script, *_ = pages.blocks(PAGE, "python")
    assert script.text.startswith("# train.py\n")
    (tmp_path / "train.py").write_text(hidden.text + script.text)
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(shown[1]), "--steps", "5", "--repeats", "1"]) == 0
    printed = shape(capsys.readouterr().out)
    first, last = words(shown[2]), shape(shown[3])
    assert printed[: len(first)] == first
    assert printed[-len(last) :] == last
