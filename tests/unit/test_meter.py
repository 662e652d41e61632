from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.monitor.meter import Meter, Waited


class Scene:
    """A clock that the test moves, and waits that it makes."""

    def __init__(self) -> None:
        self.now, self.waited, self.stats = 100.0, [1.0, 2.0, 3.0], ExchangeStats(steps=4)
        self.meter = Meter(lambda: self.stats, lambda: Waited(*self.waited), lambda: 1.5, lambda: self.now)

    def wait(self, kind: int, seconds: float) -> None:
        self.now += seconds
        self.waited[kind] += seconds


def test_every_second_is_counted_once() -> None:
    scene = Scene()
    scene.now += 1  # the loader
    scene.meter.begin_batch()
    scene.now += 4
    scene.wait(0, 2)
    scene.wait(2, 0.5)
    scene.meter.end_batch(8, torch.tensor(3.0))
    scene.wait(1, 8)
    scene.meter.pause()
    scene.now += 16
    scene.meter.resume()
    scene.now += 0.25
    figures = scene.meter.read()
    assert figures.at_s == pytest.approx(1 + 4 + 2 + 0.5 + 8 + 16 + 0.25)
    assert figures.train_s == 4
    assert (figures.exchange_wait_s, figures.sync_wait_s) == (2, 8)
    assert figures.data_wait_s == pytest.approx(1 + 0.5 + 0.25)
    assert (figures.samples, figures.batches, figures.steps, figures.epoch) == (8, 1, 4, 1.5)
    assert abs(figures.began - time.time()) < 60


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "end", "pause", "resume", "read"]), st.integers(0, 3), st.floats(0, 10))
    )
)
def test_the_seconds_never_add_up_to_more_than_the_time(events: list[tuple[str, int, float]]) -> None:
    scene = Scene()
    for event, kind, seconds in events:
        if kind < 3:
            scene.wait(kind, seconds)
        else:
            scene.now += seconds
        calls = {"begin": scene.meter.begin_batch, "end": lambda: scene.meter.end_batch(1), "read": scene.meter.read}
        calls |= {"pause": scene.meter.pause, "resume": scene.meter.resume}
        calls[event]()
    figures = scene.meter.read()
    known = figures.train_s + figures.exchange_wait_s + figures.sync_wait_s + figures.data_wait_s
    assert known == pytest.approx(figures.at_s - scene.meter._spent["other"], abs=1e-6)
    assert figures.at_s == pytest.approx(scene.now - 100.0)


def test_the_loss_is_summed_over_batches_and_what_is_not_finite_is_left_out() -> None:
    scene = Scene()
    for loss in (1.0, 2.0):
        scene.meter.end_batch(8, torch.tensor(loss))
    scene.meter.end_batch(8)  # without one
    first = scene.meter.read()
    assert (first.loss_sum, first.losses, first.batches) == (3.0, 2, 3)
    for loss in (float("nan"), 4.0, float("inf")):
        scene.meter.end_batch(8, torch.tensor([loss]))
    last = scene.meter.read()
    assert (last.loss_sum, last.losses, last.samples) == (7.0, 3, 48)


def test_losses_of_a_run_that_diverges_have_a_finite_sum() -> None:
    scene = Scene()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for _ in range(10):
            scene.meter.end_batch(1, torch.tensor(3e38, dtype=dtype))
    scene.meter.end_batch(1, torch.tensor(1e300, dtype=torch.float64))
    figures = scene.meter.read()
    assert figures.losses == 30
    assert figures.loss_sum == pytest.approx(9e39, rel=0.01)
