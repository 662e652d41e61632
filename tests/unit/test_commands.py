"""What people type after ``lightning-asgd``."""

from __future__ import annotations

import pytest

from lightning_asgd.cli.command_line import main


@pytest.mark.parametrize("words", [["--watch"], ["--watch", "--every-n-seconds", "1"], ["--watch", "true"], []])
def test_an_option_that_is_true_or_false_may_stand_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "nowhere", *words]) == 1
    assert 'Expected "host:port"' in capsys.readouterr().err  # so the words were understood
