from __future__ import annotations

import pickle
from typing import Any

import pytest

from lightning_asgd.core.foundation.stats import ExchangeRecord, ExchangeStats, Verdict


def record(**changes: Any) -> ExchangeRecord:
    values: dict[str, Any] = {
        "step": 10,
        "versions": (4, 5),
        "staleness": (1, 2),
        "verdicts": (Verdict.APPLIED, Verdict.APPLIED),
        "round_trip_s": 0.5,
        "wait_s": 0.25,
        "bytes_pushed": 100,
        "bytes_fetched": 200,
        "local_steps": 10,
        "shared": False,
    }
    return ExchangeRecord(**{**values, **changes})


def test_nothing_yet() -> None:
    stats = ExchangeStats()
    assert stats.staleness_mean == 0.0
    assert stats.last() is None
    assert stats.summary()["exchanges"] == 0


def test_sums_are_kept() -> None:
    stats = ExchangeStats()
    stats.add(record(), pushed=True, fetched=True)
    stats.add(record(staleness=(4, 0)), pushed=True, fetched=False)
    stats.add(record(staleness=(0, 0)), pushed=False, fetched=True)
    assert (stats.exchanges, stats.pushes, stats.fetches) == (3, 2, 2)
    assert (stats.wait_s, stats.round_trip_s) == (0.75, 1.5)
    assert (stats.bytes_pushed, stats.bytes_fetched) == (300, 600)


def test_staleness_is_over_pushes_and_the_worst_server_counts() -> None:
    stats = ExchangeStats()
    stats.add(record(staleness=(1, 2)), pushed=True, fetched=True)
    stats.add(record(staleness=(4, 0)), pushed=True, fetched=True)
    stats.add(record(staleness=(9, 9)), pushed=False, fetched=True)
    assert stats.staleness_mean == pytest.approx((1.5 + 2.0) / 2)
    assert stats.staleness_max == 4
    assert stats.staleness_histogram == {2: 1, 4: 1}


def test_an_exchange_counts_once_as_refused_or_repeated() -> None:
    stats = ExchangeStats()
    stats.add(record(verdicts=(Verdict.REFUSED, Verdict.REFUSED)), pushed=True, fetched=True)
    stats.add(record(verdicts=(Verdict.APPLIED, Verdict.REFUSED)), pushed=True, fetched=True)
    stats.add(record(verdicts=(Verdict.REPEATED, Verdict.APPLIED)), pushed=True, fetched=True)
    assert (stats.refused, stats.repeated) == (2, 1)


def test_only_the_last_records_are_kept_but_all_are_counted() -> None:
    stats = ExchangeStats()
    for step in range(10_010):
        stats.add(record(step=step), pushed=True, fetched=True)
    assert stats.exchanges == 10_010
    assert len(stats.records) == 10_000
    assert stats.records[0].step == 10


def test_last_and_summary_are_plain_values() -> None:
    stats = ExchangeStats()
    stats.add(record(), pushed=True, fetched=True)
    last = stats.last()
    assert last is not None
    assert last["versions"] == (4, 5)
    summary = stats.summary()
    assert summary["staleness_mean"] == 1.5
    assert summary["histogram"] == {2: 1}
    assert "records" not in summary
    assert all(isinstance(v, (int, float, dict)) for v in summary.values())


def test_stats_travel_between_processes() -> None:
    stats = ExchangeStats()
    stats.add(record(), pushed=True, fetched=True)
    assert pickle.loads(pickle.dumps(stats)) == stats
