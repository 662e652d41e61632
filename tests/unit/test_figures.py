from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.core.protocol import HeartbeatReply, WorkerMetrics
from lightning_asgd.core.protocol.codec import decode, encode
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.monitor.meter import binned
from lightning_asgd.monitor.metric_definitions import METRICS, Window, Windows, bars, measures, staleness

EARLIER = WorkerMetrics(
    **{
        "began": 5.0,
        "at_s": 10.0,
        "epoch": 1.0,
        "samples": 100,
        "batches": 10,
        "steps": 10,
        "loss_sum": 20.0,
        "losses": 10,
    },
    **{"train_s": 7.0, "exchange_wait_s": 1.0, "sync_wait_s": 1.0, "data_wait_s": 1.0, "exchanges": 6, "pushes": 5},
    **{"round_trip_s": 0.6, "bytes_pushed": 100, "bytes_fetched": 200, "staleness_sum": 5.0, "staleness_max": 4},
)
LATER = WorkerMetrics(
    **{
        "began": 5.0,
        "at_s": 12.0,
        "epoch": 1.5,
        "samples": 300,
        "batches": 30,
        "steps": 30,
        "loss_sum": 30.0,
        "losses": 30,
    },
    **{"train_s": 8.0, "exchange_wait_s": 1.2, "sync_wait_s": 1.1, "data_wait_s": 1.5, "exchanges": 10, "pushes": 9},
    **{"round_trip_s": 1.0, "bytes_pushed": 500, "bytes_fetched": 600, "staleness_sum": 15.0, "staleness_max": 6},
    **{"refused": 1, "repeated": 2, "nsync": 7, "distance": 0.5},
)


def test_metrics_of_one_worker() -> None:
    assert measures([Window(LATER, EARLIER)]) == pytest.approx(
        {
            "epoch": 1.5,
            "samples_per_s": 100.0,
            "train_loss": 0.5,
            "updates_per_s": (4 - 3) / 2,
            "updates/refused": 1.0,
            "updates/repeated": 2.0,
            "staleness/mean": 2.5,
            "staleness/max": 6.0,
            "exchange/round_trip_s": 0.1,
            "exchange/wait_s": 0.05,
            "exchange/bytes": 200.0,
            "traffic/bytes_per_s": 400.0,
            "wait/share": 0.4,
            "wait/exchange": 0.1,
            "wait/sync": 0.05,
            "wait/data": 0.25,
            "nsync": 7.0,
            "distance": 0.5,
        }
    )


def test_of_all_workers_rates_are_added_and_means_are_over_what_happened() -> None:
    slow = Window(
        WorkerMetrics(at_s=10.0, samples=10, pushes=1, staleness_sum=9.0, staleness_max=9, exchange_wait_s=5.0)
    )
    fast = Window(WorkerMetrics(at_s=1.0, samples=50, pushes=9, staleness_sum=1.0, staleness_max=1))
    together = measures([slow, fast])
    assert together["samples_per_s"] == pytest.approx(51.0)
    assert together["staleness/mean"] == pytest.approx(1.0)
    assert together["staleness/max"] == 9.0
    assert together["wait/share"] == pytest.approx(5 / 11)


def test_what_did_not_happen_has_no_value() -> None:
    assert measures([]) == {}
    nothing = measures([Window(WorkerMetrics())])
    assert nothing["samples_per_s"] == 0.0
    assert not {"train_loss", "staleness/mean", "exchange/bytes", "wait/share", "nsync", "distance"} & set(nothing)


def test_a_window_is_as_long_as_wanted_or_begins_with_the_fit() -> None:
    windows = Windows(2.0)
    for at in (0.5, 1.0, 2.25, 2.5, 4.75):
        windows.update({3: WorkerMetrics(at_s=at, samples=round(100 * at))})
        (window,) = windows.of([3]).values()
        assert window.per_s("samples") == pytest.approx(100.0)
        assert window.seconds >= min(at, 2.0)
    assert window.before.at_s == 2.5


def test_old_figures_change_nothing_and_a_worker_that_begins_anew_begins_at_zero() -> None:
    windows = Windows(1.0)
    windows.update({0: EARLIER, 1: EARLIER})
    windows.update({0: LATER, 1: WorkerMetrics(began=6.0, at_s=1.0, samples=8)})
    windows.update({0: EARLIER})
    found = windows.of([0, 1, 2])
    assert found[0] == Window(LATER, EARLIER)
    assert found[1] == Window(WorkerMetrics(began=6.0, at_s=1.0, samples=8), WorkerMetrics(began=6.0))
    assert list(found) == [0, 1]


@given(st.dictionaries(st.integers(0, 100_000), st.integers(1, 1000), max_size=200))
def test_a_histogram_in_bins_keeps_all_counts_and_stays_small(histogram: dict[int, int]) -> None:
    bins = binned(histogram)
    assert sum(bins.values()) == sum(histogram.values())
    assert len(bins) <= 16 + 13
    for value in histogram:
        assert value in bins or (value >= 16 and max(start for start in bins if start <= value) > value // 2)
    counts, edges = bars(bins)
    assert sum(counts) == sum(histogram.values())
    assert len(edges) == len(counts) + 1
    assert edges == sorted(set(edges))


def test_staleness_of_all_is_added_up() -> None:
    assert staleness([WorkerMetrics(staleness={0: 1, 2: 3}), WorkerMetrics(staleness={2: 1, 16: 5})]) == {
        0: 1,
        2: 4,
        16: 5,
    }


def test_figures_cross_the_wire_without_pickle_in_a_few_hundred_bytes() -> None:
    answer = HeartbeatReply(("news",), (0, 1), {1: LATER})
    header, buffers = encode(answer)
    assert decode(header, buffers) == answer
    assert len(header) < 1000
    assert not buffers


def test_the_later_figures_of_a_worker_stay_on_the_board() -> None:
    board = MetricsBoard(living=(0, 1))
    board.post(0, LATER)
    board.update({0: EARLIER, 1: EARLIER, 2: None}, [1, 0])
    assert board.figures == {0: LATER, 1: EARLIER}
    assert board.mine == LATER
    anew = WorkerMetrics(began=6.0)
    board.update({1: anew}, [0])
    assert (board.figures[1], board.living) == (anew, (0,))


def test_the_page_lists_every_metric_and_none_that_is_not() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    rows = dict(re.findall(r"^\| `([\w/]+)` \| ([^|]*) \|", page, re.MULTILINE))
    units = {name: metric.unit or "-" for name, metric in METRICS.items()}
    assert {name: unit.strip() for name, unit in rows.items()} == {**units, "workers/alive": "workers"}
