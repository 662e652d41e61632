"""The clicks that rows generates, and what it says of given figures. The measuring is a benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401 - sets environment variables when it is imported, which a test must not
import torch


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # it sets this for itself
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))  # its programs import each other
    return importlib.import_module("rows")


def test_frequent_ids_are_as_frequent_as_zipf_says(rows: Any) -> None:
    model = importlib.import_module("rows_model")
    drawn = model.zipf(100, 100_000, torch.Generator().manual_seed(0), skew=1.0)
    counts = torch.bincount(drawn, minlength=100).sort(descending=True).values
    assert int(drawn.min()) >= 0
    assert float(counts[0] / counts[1]) == pytest.approx(2, rel=0.1)
    assert float(counts[0] / counts[9]) == pytest.approx(10, rel=0.15)


def test_clicks_are_the_same_ones_by_seed_and_come_by_batch(rows: Any) -> None:
    model = importlib.import_module("rows_model")
    first, again = (model.Market(50, 20, seed=3).clicks(200, 100) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0].of(slice(None)), again[0].of(slice(None)), strict=True))
    assert len(first[1]) == 100
    assert 0.5 < first[2] < 1
    longer = model.Clicks(*first[0].of(slice(None)), length=1000)
    users, items, clicked = next(iter(model.loader(longer, 32)))
    assert len(longer) == 1000
    assert len(users) == len(items) == len(clicked) == 32
    assert torch.equal(longer[201][0], longer[1][0])


def counted(rows: Any, **changed: float) -> list[dict[str, Any]]:
    kinds = ("pushed", "fetched", "sent", "received")
    found = []
    for share in rows.SHARES:
        found.append({"share": share, "sparse": True, **dict.fromkeys(kinds, 1000 * share), **changed})
        found.append({"share": share, "sparse": False, **dict.fromkeys(kinds, 1000.0)})
    return found


def test_bytes_are_to_be_in_proportion(rows: Any) -> None:
    assert rows.show_bytes(counted(rows))
    assert not rows.show_bytes(counted(rows, pushed=1000.0))
    assert not rows.show_bytes(counted(rows, fetched=1.0))


@pytest.mark.parametrize(("sparse", "good"), [(0.845, True), (0.835, False), (0.865, False)])
def test_accuracy_is_to_be_that_of_dense_gradients(rows: Any, sparse: float, good: bool) -> None:
    values = {rows.SPARSE: sparse, rows.DENSE: 0.85, rows.ALONE: 0.87}
    found = [{"kind": kind, "seed": seed, "accuracy": value} for kind, value in values.items() for seed in (1, 2)]
    assert rows.show_accuracies(found) == good
