"""What make gpu says, as far as that needs no device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its programs import each other

import gpu

PARTS = ("tests", "throughput", "memory", "traced", "sharded")


def event(stream: int, category: str, begin_us: float, dur_us: float) -> dict[str, Any]:
    return {"cat": category, "ts": begin_us, "dur": dur_us, "args": {"stream": stream}}


def test_overlap_is_the_time_in_which_exchanges_and_training_both_go_on() -> None:
    training = [event(7, "kernel", 0, 100), event(7, "kernel", 100, 100), event(7, "gpu_memcpy", 200, 100)]
    exchange = [event(9, "kernel", 150, 30), event(9, "gpu_memcpy", 170, 90), event(9, "gpu_memset", 400, 10)]
    host = [{"cat": "cpu_op", "ts": 0, "dur": 500, "args": {}}, {"ph": "M"}]
    took_s, at_once_s = gpu.overlap([*training, *exchange, *host])
    assert took_s == pytest.approx(120e-6)  # 150 to 260, and 400 to 410
    assert at_once_s == pytest.approx(50e-6)  # 150 to 200: a copy of training's own is no training


def test_without_another_stream_there_are_no_exchanges() -> None:
    assert gpu.overlap([]) == (0.0, 0.0)
    assert gpu.overlap([event(7, "kernel", 0, 100)]) == (0.0, 0.0)


def test_without_a_device_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", f"--out={tmp_path}"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "This machine has no accelerator that torch can use: nothing was run.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_that_fails_is_in_the_table_and_in_the_exit_code(
    fails: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "clean_environment", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device=cpu", f"--out={tmp_path}"])
    for part in PARTS:

        def said(*_: Any, part: str = part) -> tuple[bool, str]:
            return not (fails and part == "memory"), f"figures of {part}"

        said.__name__ = part
        monkeypatch.setattr(gpu, part, said)
    assert gpu.main() == int(fails)
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith("# cpu, 1 of them, torch ")
    assert all(f"figures of {part}" in text for part in PARTS)
    assert ("FAILED: memory" in text) == fails


def test_a_program_that_is_not_done_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.SECONDS, "tests", 0.5)
    good, output = gpu.call("tests", "-c", "import time; print('begun', flush=True); time.sleep(60)")
    assert not good
    assert "It was not done within 0 s." in output
