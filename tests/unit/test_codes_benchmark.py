"""What make codes says of given figures. The measuring is a benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401 - sets environment variables when it is imported, which a test must not


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # it sets this for itself
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))  # its programs import each other
    return importlib.import_module("codes")


@pytest.mark.parametrize(
    ("curve", "seconds"),
    [
        ([(2.0, 3.0), (4.0, 2.0)], 3.0),  # half of the way
        ([(2.0, 2.4)], 2.0),  # the first validation
        ([(2.0, 3.0), (4.0, 2.6)], None),
        ([(2.0, 3.0), (3.0, 3.5), (4.0, 2.5), (5.0, 2.0)], 4.0),
        ([], None),
    ],
)
def test_the_time_is_interpolated(codes: Any, curve: list[tuple[float, float]], seconds: float | None) -> None:
    assert codes.reached_s(curve, 2.5) == pytest.approx(seconds)


def test_every_row_but_one_has_a_code(codes: Any) -> None:
    assert [row for row in codes.ROWS if codes.code_of(row) is None] == [codes.FP32]


def test_codes_are_timed_beside_copies(codes: Any) -> None:
    times = codes.time_codes(list(codes.ROWS), megabytes=1, repeats=2)
    assert set(codes.FAST) < times.keys() == {"bf16", "fp16", "int8", "topk", "4bit", "2bit", "1bit", "SparseLoCo"}
    assert all(len(found) == 2 for found in times.values())


@pytest.mark.parametrize(("row", "encode_s", "good"), [("4bit", 5.9, True), ("4bit", 6.1, False), ("topk", 7.0, True)])
def test_codes_of_few_bits_have_a_limit(codes: Any, row: str, encode_s: float, good: bool) -> None:
    times = {row: [{"copy_s": 1.0, "encode_s": encode_s, "decode_s": 2.0}]}
    assert codes.show_speed(times, 100) is good


def entry(loss: float) -> dict[str, float]:
    return {"loss": loss, "pushed": 1000.0, "fetched": 2000.0, "cable": 4000.0}


@pytest.mark.parametrize(("row", "loss", "good"), [("4bit", 2.01, True), ("4bit", 2.03, False), ("1bit", 2.03, True)])
def test_four_bits_lose_at_most_one_per_cent(codes: Any, row: str, loss: float, good: bool) -> None:
    assert codes.show_losses({"fp32": [entry(2.0)], row: [entry(loss)]}) is good


def test_a_race_shows_who_is_late(codes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = {"reached_s": 90.0, "in_time": False}, {"reached_s": 9.0, "in_time": True}
    codes.show_race({"10": {"fp32": [slow], "4bit": [fast]}}, 2.2)
    text = capsys.readouterr().out
    assert "(not reached)" in text
    assert "0.10 (0.10-0.10)" in text
