from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.data_stalls.stalls import Stalls

SECONDS = st.floats(0.001, 1.0)


def found(**changes: Any) -> Stalls:
    """One process that loads: 10 ms of training, 20 ms of preparing, 30 ms of fetching."""
    settings: dict[str, Any] = {"batch_size": 6, "processes": 1}
    settings |= {"synthetic_s": 0.01, "cached_s": 0.02, "cold_s": 0.05, "prep_s": 0.02, "load_s": 0.05}
    return Stalls(**(settings | changes))


@st.composite
def measured(draw: Any) -> Stalls:
    """What a loader without contention gives."""
    train, prep, fetch = draw(SECONDS), draw(SECONDS), draw(SECONDS)
    processes = draw(st.integers(0, 8))
    prep, load = prep / max(1, processes), (prep + fetch) / max(1, processes)
    together = (lambda t: max(train, t)) if processes else (lambda t: train + t)
    return found(
        processes=processes,
        synthetic_s=train,
        cached_s=together(prep),
        cold_s=together(load),
        prep_s=prep,
        load_s=load,
    )


def test_stalls_are_differences() -> None:
    assert found().prep_stall_s == pytest.approx(0.01)
    assert found().fetch_stall_s == pytest.approx(0.03)
    assert found(sync_s=0.002).step_s == pytest.approx(0.052)


def test_a_pass_that_happened_to_be_faster_is_no_stall() -> None:
    assert found(cached_s=0.009).prep_stall_s == 0.0
    assert found(cold_s=0.019).fetch_stall_s == 0.0


def test_rates() -> None:
    rates = (found().device_rate, found().prep_rate, found().fetch_rate)
    assert rates == (pytest.approx(600), pytest.approx(300), pytest.approx(200))
    assert found().bound == pytest.approx(200)
    assert found(load_s=0.02).fetch_rate == math.inf


def test_what_if() -> None:
    assert found().predicted_step_s() == pytest.approx(0.05)
    assert found().predicted_step_s(processes=2) == pytest.approx(0.04)
    assert found().predicted_step_s(processes=0) == pytest.approx(0.06)
    assert found().predicted_step_s(cached=1.0) == pytest.approx(0.02)
    assert found().predicted_step_s(storage=3.0) == pytest.approx(0.03)
    assert found().predicted_step_s(processes=4, cached=1.0) == pytest.approx(0.01)
    assert found(sync_s=0.5).predicted_step_s() == pytest.approx(0.55)


@given(measured())
def test_what_is_as_it_was_is_predicted_as_measured(stalls: Stalls) -> None:
    assert stalls.predicted_step_s() == pytest.approx(stalls.cold_s)
    assert stalls.predicted_step_s(cached=1.0) == pytest.approx(stalls.cached_s)


@given(measured())
def test_the_parts_make_up_the_step(stalls: Stalls) -> None:
    assert stalls.synthetic_s + stalls.prep_stall_s + stalls.fetch_stall_s == pytest.approx(stalls.step_s)


@given(measured(), st.integers(1, 16), st.floats(0, 1), st.floats(1, 10))
def test_nothing_is_faster_than_the_device(stalls: Stalls, processes: int, cached: float, storage: float) -> None:
    seconds = stalls.predicted_step_s(processes=processes, cached=cached, storage=storage)
    assert seconds >= stalls.synthetic_s
    assert stalls.batch_size / stalls.predicted_step_s() <= stalls.bound * (1 + 1e-9)
