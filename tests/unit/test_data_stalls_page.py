from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import lightning_asgd
from lightning_asgd.cli.command_line import main

PAGE = Path(lightning_asgd.__file__).parent.parent / "docs" / "data_stalls.md"


def shape(text: str) -> list[str]:
    """What stands there but for figures and the advice: a rate may be too fast to be measured."""
    tables, verdict, _ = text.partition("Data loading takes ")
    assert verdict
    return re.findall(r"[a-z]{3,}", re.sub(r"\d+(\.\d+)? m?s\b|no limit seen", "", tables))


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    script = re.search(r"```python\n# train.py\n(.*?)```", page, re.DOTALL)
    shown = re.search(r"```\n\$ lightning-asgd (stalls .*?)\n(.*?)```", page, re.DOTALL)
    assert script is not None
    assert shown is not None
    (tmp_path / "train.py").write_text(script[1])
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(shown[1]), "--steps", "5", "--repeats", "1"]) == 0
    assert shape(capsys.readouterr().out) == shape(shown[2])
