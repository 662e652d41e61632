"""What a worker's membership in a job does when the layout changes within a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.foundation.errors import LayoutMismatchError
from lightning_asgd.core.lightning.trainer_shell import TrainerShell
from lightning_asgd.core.protocol import Policy
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.collectives import Phase
from lightning_asgd.core.worker.fixed_fleet import FixedFleet
from lightning_asgd.core.worker.metrics_board import MetricsBoard


class Two:
    """Two workers that have joined a session; worker 0 is chief, and another one may become it."""

    def __init__(self) -> None:
        self.service = Service()
        transport = InProcessTransport([self.service.handle])
        job: Any = SimpleNamespace(
            session="j.0.1", connect=lambda: transport, hosts=None, placed=frozenset(), server_machines=1
        )
        files = SimpleNamespace(best_model_path="worker 0's.ckpt")
        shell = TrainerShell(SimpleNamespace(checkpoint_callbacks=[files], loggers=[]), "cpu")
        about = ExchangeConfig.create(nsync=1), Policy(60.0, another_chief=True), MetricsBoard()
        self.fleets = [FixedFleet(job, *about, shell, (rank, 2), fits=True) for rank in (0, 1)]
        self.both(FixedFleet.join)

    def both(self, act: Callable[[FixedFleet], None]) -> None:
        """Have both do something at a time, since they meet."""
        threads = [threading.Thread(target=act, args=[fleet]) for fleet in self.fleets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive()

    @property
    def session(self) -> str:
        assert self.service.session is not None
        return self.service.session.members.session


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    for fleet in made.fleets:
        fleet.end_membership()


def test_the_next_chief_finds_the_state_of_the_one_before_also_after_a_new_layout(two: Two) -> None:
    two.fleets[0].publish_chief_state()
    assert two.fleets[1].published_checkpoints() == [{"best_model_path": "worker 0's.ckpt"}]
    two.both(FixedFleet.begin_generation)
    assert two.session == "j.0.1.1"
    assert two.fleets[1].published_checkpoints() == [{"best_model_path": "worker 0's.ckpt"}]


def test_a_process_that_enters_late_with_another_layout_ends_itself_only(two: Two) -> None:
    two.fleets[1].collectives.phase = Phase.ENTERING  # it replaces worker 1, and has not trained yet
    with pytest.raises(LayoutMismatchError, match=r"^Worker 1 was replaced, but its new process .* Expected "):
        two.fleets[1].begin_generation()
    assert two.session == "j.0.1"
    assert two.fleets[0].client.note("chief") is None  # the others' session answers


@pytest.mark.parametrize(("samplers", "mine", "published"), [([], 0, False), (["Own"], 0, True), ([], 1, True)])
def test_a_process_that_enters_gets_an_order_that_it_may_be_unable_to_make(
    two: Two, samplers: list[str], mine: int, published: bool, caplog: pytest.LogCaptureFixture
) -> None:
    orders, found = [[[3, 1, 2]], [[1, 2, 3] if mine else [3, 1, 2]]], {}
    for fleet in two.fleets:
        fleet._may_enter = True

    def agree(fleet: FixedFleet) -> None:
        found[fleet.rank] = fleet.common_order("j.0.1/5", samplers, orders[fleet.rank]).parts

    two.both(agree)
    assert found == {0: [[3, 1, 2]], 1: [[3, 1, 2]]}
    assert caplog.text.count("The order of the samples differs between workers. They share that of worker 0") == mine
    chief, late = two.fleets
    late.entry, late.collectives.phase = replace(chief._start), Phase.ENTERING
    entered = late.common_order("j.0.1/5", samplers, [[2, 1, 3]])
    assert entered.parts == ([[3, 1, 2]] if published else [[2, 1, 3]])
    assert late.common_order("j.0.1/9", samplers, [[2, 1, 3]]).parts == [[2, 1, 3]]  # of another epoch
