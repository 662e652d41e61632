from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd import Advanced
from lightning_asgd.algorithms import (
    ASGD,
    EASGD,
    DecoupledDiLoCo,
    Downpour,
    DropStale,
    LocalSGD,
    SoftSync,
    StaleSynchronous,
    StreamingDiLoCo,
)
from lightning_asgd.compression import find_compression
from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.errors import ProtocolError, ServerLostError
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Exchange, Join, Leave
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.synchronizer import WorkFeed, run
from tests.helpers.cluster import SESSION, Cluster, layout_of_floats, prepare
from tests.helpers.reference import Reference
from tests.helpers.script import ScriptedTransport, Waits, bits

CAN_SHARE = shared_memory.create([]) is not None
NEEDS_SHARED_MEMORY = pytest.mark.skipif(not CAN_SHARE, reason="this system has no shared memory")


class Clock:
    """One second passes between any two looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Worker:
    """One weight vector, and an exchanger that thinks it is a module's."""

    def __init__(self, cluster: Cluster, rank: int = 0, start: list[float] | None = None, **settings: Any) -> None:
        self.w = torch.tensor(start if start is not None else [0.0] * 4)
        self.refused = 0
        self.exchanger = cluster.enter(rank, {"w": self.w}, on_refused=self._count, **settings)

    def _count(self) -> None:
        self.refused += 1

    def train(self, change: float | torch.Tensor) -> None:
        """What a batch does."""
        self.w += change
        self.exchanger.count_step()

    def step(self, change: float | torch.Tensor) -> None:
        """A batch, and what the strategy's hook does before the next one."""
        self.train(change)
        run(self.exchanger.advance())


def scripted(servers: int = 1, workers: int = 1) -> tuple[Cluster, ScriptedTransport]:
    cluster = Cluster(servers, workers)
    cluster.transport = transport = ScriptedTransport([s.handle for s in cluster.services])
    return cluster, transport


def pushes(transport: ScriptedTransport, server: int = 0) -> list[Exchange]:
    count = transport.num_servers
    messages = [m for m in transport.log if isinstance(m, Exchange)]
    return [m for m in messages[server::count] if m.push]


def test_who_goes_on_after_a_flush_fetches_first_where_servers_are_restored() -> None:
    """Else there could be two pushes that no fetch has followed, and no telling what a lost server's weights held."""
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=10, algorithm=ASGD("sum"))
    for remembers in (False, True):
        worker.exchanger.channels[0].replica.remembers = remembers
        worker.train(1.0)
        run(worker.exchanger.flush())
        transport.log.clear()
        run(worker.exchanger.begin())
        assert [m.fetch for m in transport.log] == [True] * remembers
        assert worker.exchanger.moved
    assert worker.w.tolist() == [2.0] * 4


# ---------------------------------------------------------------------- when


@pytest.mark.parametrize(("nsync", "steps", "expected"), [(1, 5, 5), (3, 8, 2), (10, 9, 0)])
def test_an_exchange_starts_every_nsync_steps(nsync: int, steps: int, expected: int) -> None:
    worker = Worker(Cluster(2), nsync=nsync)
    for _ in range(steps):
        worker.step(1.0)
    run(worker.exchanger.advance())  # an exchange counts once its answer is merged
    stats = worker.exchanger.stats
    assert (stats.pushes, stats.fetches, stats.steps) == (expected, expected, steps)


@pytest.mark.parametrize(("nfetch", "npush"), [(2, 3), (3, 2), (1, 4), (4, 1), (6, 2)])
def test_fetches_and_pushes_keep_their_own_rhythm(nfetch: int, npush: int) -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=1, advanced=Advanced(nfetch=nfetch, npush=npush), algorithm=ASGD("sum"))
    transport.log.clear()
    for _ in range(12):
        worker.step(1.0)
    run(worker.exchanger.advance())
    stats = worker.exchanger.stats
    assert (stats.pushes, stats.fetches) == (12 // npush, 12 // nfetch)
    both = 12 // math.lcm(nfetch, npush)
    assert stats.exchanges == stats.pushes + stats.fetches - both == len(transport.log)
    assert worker.exchanger.peek()["w"].tolist() == [12.0 // npush * npush] * 4
    assert worker.w.tolist() == [12.0] * 4  # a fetch takes away nothing that is not pushed yet


def test_advance_without_a_step_does_nothing() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=1)
    transport.log.clear()
    for _ in range(3):
        run(worker.exchanger.advance())
    assert transport.log == []


def test_pushes_are_numbered_from_one() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=2)
    for _ in range(6):
        worker.step(1.0)
    run(worker.exchanger.fetch())
    assert [m.seq for m in pushes(transport)] == [1, 2, 3]


def test_one_exchange_is_in_flight_and_the_rest_is_put_off() -> None:
    cluster, transport = scripted(servers=2)
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"))
    transport.hold()
    for _ in range(7):
        worker.step(1.0)
    assert len(transport.in_flight) == 2  # one message per server
    assert worker.exchanger.stats.deferred == 4  # steps 4, 5, 6 and 7
    transport.deliver()
    worker.step(1.0)
    assert [m.update[0].tolist() for m in pushes(transport)] == [[2.0, 2.0], [6.0, 6.0]]
    assert len(transport.in_flight) == 2
    transport.deliver()
    run(worker.exchanger.flush())
    assert [r.local_steps for r in worker.exchanger.stats.records] == [2, 6]


def test_an_answer_counts_once_all_servers_have_answered() -> None:
    cluster, transport = scripted(servers=2)
    worker = Worker(cluster, nsync=1)
    transport.hold()
    worker.step(1.0)
    transport.arrive(0)
    transport.arrive(1)
    transport.answer(0)
    worker.step(1.0)
    assert worker.exchanger.stats.exchanges == 0
    transport.answer(1)
    worker.step(1.0)
    assert worker.exchanger.stats.exchanges == 1


def test_a_worker_waits_after_so_many_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=2, advanced=Advanced(max_offline_steps=5), algorithm=ASGD("sum"))
    transport.hold()
    waits = Waits(monkeypatch, transport)
    for _ in range(6):
        worker.step(1.0)
    assert (waits.count, worker.exchanger.stats.deferred) == (0, 3)
    worker.step(1.0)
    assert waits.count == 1
    assert [m.update[0].tolist() for m in pushes(transport)] == [[2.0] * 4, [5.0] * 4]


@dataclass
class Left(WorkFeed):
    """Data that a sync point follows, and what exchanges have said."""

    left_s: float = math.inf
    said: list[float] = field(default_factory=list)

    def ask_ahead(self, seconds: float) -> None:
        self.said.append(seconds)


def far(left_s: float, **settings: Any) -> tuple[Worker, Left, ScriptedTransport, Callable[..., None]]:
    """A worker whose exchanges take 2 s; its data; its wire; and what lets it train a batch."""
    cluster, transport = scripted()
    now, data = [0.0], Left(left_s)
    worker = Worker(cluster, nsync=2, clock=lambda: now[0], data=data, **settings)
    transport.log.clear()
    transport.hold()

    def train(seconds: float = 2.0) -> None:
        now[0] += seconds
        transport.deliver()
        worker.step(1.0)

    for _ in range(3):
        train()
    return worker, data, transport, train


def test_no_exchange_begins_that_the_next_sync_point_would_have_to_wait_for() -> None:
    worker, data, transport, train = far(100.0, algorithm=ASGD("sum"))
    assert len(transport.log) == 1
    data.left_s = 1.9
    for _ in range(3):
        train()
    assert len(transport.log) == 1
    assert worker.exchanger.stats.deferred == 0
    data.left_s = 2.1  # it takes longer than was thought
    train()
    assert [m.update[0].tolist() for m in transport.log] == [[2.0] * 4, [5.0] * 4]


def test_before_an_exchange_begins_it_says_how_long_nothing_else_will_get_through() -> None:
    worker, data, transport, train = far(100.0)
    assert data.said == [0.0]  # nothing is known before the first
    while len(data.said) < 2:
        before = len(transport.log)
        train()
    assert data.said == [0.0, 2.0]
    assert len(transport.log) == before + 1  # it begins right after
    transport.release()
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch())
    assert len(data.said) == 2  # nobody trains meanwhile


def test_one_exchange_that_took_very_long_does_not_put_the_next_off() -> None:
    _, data, transport, train = far(100.0)
    while not transport.in_flight:
        train()
    data.left_s = 10.0
    train(60.0)  # a server was lost, and replaced
    transport.log.clear()
    for _ in range(2):
        train()
    assert len(transport.log) == 1


@pytest.mark.parametrize(
    "settings", [{"advanced": Advanced(max_offline_steps=3)}, {"algorithm": ASGD(transforms=[StaleSynchronous(2)])}]
)
def test_an_exchange_begins_also_late_if_it_must(settings: dict[str, Any]) -> None:
    _, data, transport, train = far(100.0, **settings)
    before, data.left_s = len(transport.log), 0.0
    for _ in range(3):
        train()
    assert len(transport.log) > before


def test_an_exchange_that_took_very_long_is_not_the_last_before_a_sync_point() -> None:
    worker, data, transport, train = far(100.0)
    data.left_s = 1.0
    transport.release()
    for _ in range(4):
        run(worker.exchanger.fetch())
    transport.log.clear()
    for _ in range(2):
        train()
    assert len(transport.log) == 1


def test_without_overlap_every_exchange_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=2, advanced=Advanced(overlap=False))
    transport.hold()
    waits = Waits(monkeypatch, transport)
    for step in range(1, 7):
        worker.step(1.0)
        assert waits.count == step // 2
        assert transport.in_flight == []
    assert worker.exchanger.stats.deferred == 0


# ---------------------------------------------------------------------- what


def someone_else_pushes(cluster: Cluster, value: float, seq: int = 1, rank: int = 1) -> None:
    layout = layout_of_floats(4, len(cluster.services))
    for s, service in enumerate(cluster.services):
        update = torch.full((layout.shard(s)[0][2],), value)
        service.handle(Join(SESSION, rank, cluster.workers))
        service.handle(Exchange(SESSION, rank, seq, 0, True, False, (update,)))


def test_steps_taken_during_an_exchange_are_kept_and_pushed_next() -> None:
    cluster, transport = scripted(workers=2)
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"))
    transport.hold()
    worker.step(1.0)
    worker.step(1.0)
    someone_else_pushes(cluster, 100.0)
    worker.step(10.0)
    transport.deliver()
    run(worker.exchanger.advance())
    assert worker.w.tolist() == [112.0] * 4  # 2 pushed, 100 of the other's, 10 kept
    worker.step(10.0)
    transport.deliver()
    run(worker.exchanger.flush())
    assert pushes(transport)[1].update[0].tolist() == [20.0] * 4
    assert worker.exchanger.versions == [3]


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=NEEDS_SHARED_MEMORY)])
def test_a_worker_is_one_step_of_the_others_ahead_and_pushes_what_it_trains(shared: bool) -> None:
    cluster = Cluster(workers=2)
    worker, other = (
        Worker(cluster, rank, nsync=2, advanced=Advanced(overlap=False), shared=shared) for rank in range(2)
    )
    for _ in range(2):
        worker.step(1.0)
    assert bits(worker.w) == bits(torch.full((4,), 1.0 + 0.5))  # half of two steps, and half a step
    worker.train(1.0)
    run(worker.exchanger.flush())
    run(other.exchanger.fetch())
    assert bits(other.w) == bits(torch.full((4,), 1.5))  # half of three
    run(worker.exchanger.fetch())
    assert bits(worker.w) == bits(other.w)
    cluster.close()


def test_without_overlap_the_answer_is_taken_as_it_is() -> None:
    cluster = Cluster(workers=2)
    worker = Worker(cluster, nsync=1, algorithm=ASGD("mean"), advanced=Advanced(overlap=False))
    someone_else_pushes(cluster, 8.0)
    worker.step(1.0)
    assert worker.w.tolist() == [4.0 + 0.5 + 0.5] * 4  # half of both pushes, and what the other one adds in a step


def test_an_answer_that_comes_before_the_next_step_is_taken_as_it_is() -> None:
    cluster, transport = scripted(workers=2)
    worker = Worker(cluster, nsync=1, algorithm=ASGD(1e-6))
    transport.hold()
    worker.step(0.3)
    x = worker.w.clone()
    transport.deliver()
    run(worker.exchanger.advance())
    transport.release()
    servers = worker.exchanger.peek()["w"]
    assert bits(x + (servers - x)) != bits(servers)  # merging, the same in theory, would lose digits
    assert bits(worker.w) == bits(servers)


def test_flush_pushes_what_was_trained_since() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=5, algorithm=ASGD("sum"))
    for _ in range(7):
        worker.step(1.0)
    run(worker.exchanger.flush())
    assert [m.update[0].tolist() for m in pushes(transport)] == [[5.0] * 4, [2.0] * 4]
    assert transport.log[-1].fetch is False
    assert worker.exchanger.peek()["w"].tolist() == [7.0] * 4
    sent = len(transport.log)
    run(worker.exchanger.flush())
    assert len(transport.log) == sent  # nothing was trained since


def test_flush_waits_for_the_exchange_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, transport = scripted(servers=2)
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"))
    transport.hold()
    waits = Waits(monkeypatch, transport)
    for _ in range(3):
        worker.step(1.0)
    run(worker.exchanger.flush())
    assert waits.count == 2  # for the exchange of two steps, then for the push of the third
    assert cluster.versions() == [2, 2]
    stats = worker.exchanger.stats
    assert stats.wait_s == 0.0


def test_fetch_takes_the_servers_weights_and_forgets_what_was_not_flushed() -> None:
    cluster = Cluster(2, 2)
    worker = Worker(cluster, nsync=10, algorithm=ASGD("sum"))
    worker.step(1.0)
    assert worker.exchanger.moved
    someone_else_pushes(cluster, 5.0)
    run(worker.exchanger.fetch())
    assert worker.w.tolist() == [5.0] * 4
    assert not worker.exchanger.moved
    assert worker.exchanger.versions == [1, 1]


def test_what_was_not_flushed_is_not_pushed_after_a_fetch() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=10, algorithm=ASGD("sum"))
    worker.step(1.0)
    run(worker.exchanger.fetch())
    worker.step(2.0)
    run(worker.exchanger.flush())
    assert pushes(transport)[-1].update[0].tolist() == [2.0] * 4
    assert worker.exchanger.peek()["w"].tolist() == [2.0] * 4


def test_peek_reads_the_servers_weights_and_changes_nothing() -> None:
    cluster = Cluster(2, 2)
    worker = Worker(cluster, nsync=10, algorithm=ASGD("sum"))
    worker.step(1.0)
    someone_else_pushes(cluster, 5.0)
    assert worker.exchanger.peek()["w"].tolist() == [5.0] * 4
    assert worker.w.tolist() == [1.0] * 4
    run(worker.exchanger.flush())
    assert worker.exchanger.peek()["w"].tolist() == [6.0] * 4
    assert cluster.versions() == [2, 2]


def test_peek_ends_the_exchange_under_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # The transport refuses a second message to a server that has not answered the first: it would use its buffers.
    cluster, transport = scripted(servers=2, workers=2)
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"))
    transport.hold()
    Waits(monkeypatch, transport)
    for _ in range(3):
        worker.step(1.0)
    someone_else_pushes(cluster, 5.0)
    assert worker.exchanger.peek()["w"].tolist() == [7.0] * 4
    assert worker.w.tolist() == [8.0] * 4
    assert worker.exchanger.stats.exchanges == 1


@NEEDS_SHARED_MEMORY
def test_nothing_but_the_verdict_travels_where_memory_is_shared() -> None:
    cluster, transport = scripted(servers=2)
    worker = Worker(cluster, nsync=1, algorithm=ASGD("sum"), shared=True)
    for _ in range(3):
        worker.step(1.0)
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch())
    assert worker.w.tolist() == [3.0] * 4
    assert [m.update for m in pushes(transport)] == [None] * 3
    assert [r.shared for r in worker.exchanger.stats.records] == [True] * 4
    worker.exchanger.close()
    cluster.close()


def test_flush_and_fetch_give_every_worker_the_same_bits() -> None:
    cluster = Cluster(3, 3)
    workers = [Worker(cluster, rank, nsync=2) for rank in range(3)]
    for rank, worker in enumerate(workers):
        for step in range(3 + rank):
            worker.step(torch.randn(4, generator=torch.Generator().manual_seed(10 * rank + step)))
    for worker in workers:
        run(worker.exchanger.flush())
    for worker in workers:
        run(worker.exchanger.fetch())
    assert len({bits(worker.w) for worker in workers}) == 1


def test_a_message_is_never_changed_while_it_is_sent() -> None:
    # ScriptedTransport compares each message with what it was, when it arrives.
    cluster, transport = scripted(servers=2)
    worker = Worker(cluster, nsync=1)
    transport.hold()
    for _ in range(5):
        worker.step(1.0)
    transport.deliver()
    worker.step(1.0)
    transport.deliver()
    transport.release()
    run(worker.exchanger.flush())
    worker.exchanger.peek()


# ---------------------------------------------------------------------- refused, failed, lost


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=NEEDS_SHARED_MEMORY)])
def test_a_refused_update_is_replaced_by_the_servers_weights(overlap: bool, bad: float, shared: bool) -> None:
    cluster = Cluster(2, 2)
    worker = Worker(cluster, nsync=1, algorithm=ASGD("sum"), advanced=Advanced(overlap=overlap), shared=shared)
    someone_else_pushes(cluster, 5.0)
    worker.step(torch.tensor([1.0, bad, bad, 1.0]))  # half of it on each server
    run(worker.exchanger.advance())
    assert worker.w.tolist() == [5.0] * 4
    assert worker.refused == 1
    assert worker.exchanger.stats.refused == 1
    assert cluster.counts("refused") == [1, 1]
    worker.step(1.0)
    run(worker.exchanger.advance())
    assert worker.w.tolist() == [6.0] * 4
    assert worker.refused == 1
    worker.exchanger.close()
    cluster.close()


def test_steps_taken_on_top_of_a_refused_update_are_forgotten() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=1, algorithm=ASGD("sum"))
    transport.hold()
    worker.step(math.nan)
    worker.step(1.0)
    transport.deliver()
    run(worker.exchanger.advance())
    assert worker.w.tolist() == [0.0] * 4
    assert worker.refused == 1
    transport.release()
    worker.step(1.0)
    run(worker.exchanger.flush())
    assert worker.exchanger.peek()["w"].tolist() == [1.0] * 4


def test_after_a_refusal_nothing_is_left_to_push() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"))
    transport.hold()
    worker.step(math.nan)
    worker.step(1.0)
    worker.step(1.0)
    transport.deliver()
    run(worker.exchanger.advance())
    transport.release()
    worker.step(1.0)
    assert len(pushes(transport)) == 1  # the steps begin to count anew
    run(worker.exchanger.fetch())
    run(worker.exchanger.flush())
    sent = len(pushes(transport))
    run(worker.exchanger.flush())
    assert len(pushes(transport)) == sent


def test_a_push_alone_that_is_refused_brings_the_servers_weights_too() -> None:
    cluster = Cluster()
    worker = Worker(cluster, nsync=1, advanced=Advanced(nfetch=100), algorithm=ASGD("sum"))
    worker.step(1.0)
    worker.step(math.nan)
    run(worker.exchanger.advance())
    assert worker.w.tolist() == [1.0] * 4
    assert worker.refused == 1
    assert worker.exchanger.versions == [1]


def test_an_update_refused_at_the_last_flush_is_replaced_too() -> None:
    worker = Worker(Cluster(), nsync=10, algorithm=ASGD("sum"))
    worker.step(math.inf)
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch())
    assert worker.w.tolist() == [0.0] * 4
    assert worker.refused == 1


def test_a_lost_server_is_noticed_at_the_next_advance() -> None:
    cluster, transport = scripted(servers=2)
    worker = Worker(cluster, nsync=1)
    transport.hold()
    worker.step(1.0)
    transport.arrive(0)
    transport.answer(0)
    transport.lose(1)
    with pytest.raises(ServerLostError, match="Server 1 is lost"):
        run(worker.exchanger.advance())


def test_a_servers_error_is_raised_at_the_next_advance() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=1)
    transport.hold()
    worker.step(1.0)
    cluster.services[0].close()
    transport.deliver()
    with pytest.raises(ProtocolError, match="not the current one"):
        run(worker.exchanger.advance())


def test_closing_forgets_the_exchange_under_way() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=1)
    transport.hold()
    worker.step(1.0)
    worker.exchanger.close()
    worker.exchanger.close()
    assert worker.exchanger.channels[0].replica.wire == []


# ---------------------------------------------------------------------- figures


def test_records_tell_versions_staleness_bytes_and_times() -> None:
    cluster, transport = scripted(servers=2, workers=2)
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"), clock=Clock())
    someone_else_pushes(cluster, 1.0, seq=1)
    someone_else_pushes(cluster, 1.0, seq=2)
    transport.hold()
    worker.step(1.0)
    worker.step(1.0)
    transport.deliver()
    worker.step(1.0)
    record = worker.exchanger.stats.records[-1]
    assert (record.step, record.local_steps) == (2, 2)
    assert (record.versions, record.staleness) == ((3, 3), (2, 2))
    assert record.verdicts == (Verdict.APPLIED, Verdict.APPLIED)
    assert (record.bytes_pushed, record.bytes_fetched) == (16, 16)
    assert record.shared is False
    assert record.round_trip_s > record.wait_s > 0.0
    stats = worker.exchanger.stats
    assert (stats.staleness_mean, stats.staleness_max) == (2.0, 2)
    assert (stats.bytes_pushed, stats.bytes_fetched) == (16, 16)


def test_a_push_or_a_fetch_alone_counts_its_bytes_alone() -> None:
    worker = Worker(Cluster(), nsync=1, advanced=Advanced(nfetch=3, npush=2))
    for _ in range(5):
        worker.step(1.0)
    run(worker.exchanger.advance())
    stats = worker.exchanger.stats
    assert (stats.pushes, stats.fetches) == (2, 1)
    assert (stats.bytes_pushed, stats.bytes_fetched) == (32, 16)


def test_the_distance_to_the_servers_is_measured_now_and_then_and_only_if_wanted() -> None:
    cluster, clock = Cluster(workers=2), Clock()
    blind, worker = (
        Worker(cluster, 0, nsync=1, algorithm=ASGD("sum")),
        Worker(cluster, 1, nsync=1, measure=True, clock=clock),
    )
    blind.step(3.0)  # a push of 3
    distances = []
    for _ in range(3):
        worker.step(1.0)
        run(worker.exchanger.advance())
        distances.append(worker.exchanger.stats.distance)
        blind.step(1.0)
        clock.now += 2.0
    assert distances[0] == pytest.approx(2 * 3.0)  # of four weights, each behind by what the other has pushed
    assert distances[1] == distances[0]
    clock.now += 5000.0
    worker.step(0.0)
    run(worker.exchanger.advance())
    assert worker.exchanger.stats.distance != distances[0]
    assert worker.exchanger.stats.nsync == 1
    assert blind.exchanger.stats.distance == 0.0


def test_a_push_is_as_stale_as_the_weights_it_was_trained_from() -> None:
    worker = Worker(Cluster(), nsync=1, advanced=Advanced(nfetch=3))
    for _ in range(6):
        worker.step(1.0)
    run(worker.exchanger.advance())
    staleness = [r.staleness[0] for r in worker.exchanger.stats.records]
    assert staleness == [0, 1, 2, 0, 1, 2]  # its own pushes count: its base does not have them either


def test_waits_at_sync_points_are_counted_apart() -> None:
    worker = Worker(Cluster(), nsync=10, clock=Clock())
    worker.step(1.0)
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch())
    stats = worker.exchanger.stats
    assert stats.wait_s == 0.0
    assert stats.sync_wait_s > 0.0


# ---------------------------------------------------------------------- the reference rule

ACTIONS = [
    *[("step", 0)] * 2,
    *[("advance", 0)] * 3,
    *[("deliver", 0)] * 2,  # everything in flight arrives and is answered
    ("arrive", 0),
    ("answer", 0),
    ("arrive", 1),
    ("answer", 1),
]
N = 5


def change(number: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(number))


class Scripted(Worker):
    """A worker with a wire of its own to the common servers."""

    def __init__(self, cluster: Cluster, rank: int, **settings: Any) -> None:
        cluster.transport = self.wire = ScriptedTransport([s.handle for s in cluster.services])
        super().__init__(cluster, rank, change(-1).tolist(), **settings)
        self.wire.hold()


@given(
    script=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ACTIONS)), min_size=40, max_size=80),
    workers=st.integers(2, 3),
    servers=st.integers(1, 2),
    nfetch=st.integers(1, 3),
    npush=st.integers(1, 3),
    scale=st.sampled_from(["sum", 0.5, 0.25]),
    shared=st.booleans() if CAN_SHARE else st.just(False),
)
@settings(max_examples=100)
def test_every_script_gives_the_bits_of_the_single_threaded_reference(
    script: list[tuple[int, tuple[str, int]]],
    workers: int,
    servers: int,
    nfetch: int,
    npush: int,
    scale: str | float,
    shared: bool,
) -> None:
    cluster = Cluster(servers, workers)
    rules = {
        "nsync": 1,
        "advanced": Advanced(nfetch=nfetch, npush=npush, max_offline_steps=10**6),
        "algorithm": ASGD(scale),
    }
    team = [Scripted(cluster, rank, shared=shared, **rules) for rank in range(workers)]
    bounds = [slice(*layout_of_floats(N, servers).bounds(s, 0)) for s in range(servers)]
    factor = 1.0 if scale == "sum" else float(scale)
    reference = Reference(change(-1), bounds, factor, workers, nfetch, npush)
    for number, (rank, (action, server)) in enumerate(script):
        rank, server = rank % workers, server % servers
        if action == "step":
            team[rank].train(change(number))
            reference.step(rank, change(number))
        elif action == "advance":
            run(team[rank].exchanger.advance())
            reference.advance(rank)
        elif action == "deliver":
            team[rank].wire.deliver()
            for s in range(servers):
                reference.arrive(rank, s)
                reference.answer(rank, s)
        elif action == "arrive":
            team[rank].wire.arrive(server)
            reference.arrive(rank, server)
        else:
            team[rank].wire.answer(server)
            reference.answer(rank, server)
        assert [bits(w.w) for w in team] == [bits(x) for x in reference.x]
    for rank, worker in enumerate(team):
        worker.wire.release()
        run(worker.exchanger.flush())
        reference.flush(rank)
    for worker in team:
        run(worker.exchanger.fetch())
        assert bits(worker.w) == bits(reference.server)
        assert [bits(x) for x in worker.exchanger.peek().values()] == [bits(reference.server)]
    for worker in team:
        worker.exchanger.close()
    cluster.close()


@given(
    order=st.permutations([rank for rank in range(4) for _ in range(3)]),
    servers=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=40)
def test_whole_numbers_from_four_workers_sum_up_exactly_in_any_order_with_repetitions(
    order: list[int], servers: int, random: Random
) -> None:
    cluster = Cluster(servers, 4)
    layout = layout_of_floats(N, servers)
    shards = [layout.shard(s)[0][2] for s in range(servers)]
    prepare(cluster.transport, SESSION, layout, [torch.zeros(n) for n in shards], workers=4)
    number = [0] * 4
    sent: list[list[Exchange]] = []
    total = torch.zeros(N)
    for rank in order:
        number[rank] += 1
        update = torch.randint(-1000, 1000, (N,), generator=torch.Generator().manual_seed(len(sent))).float()
        total += update
        parts = update.split(shards)
        sent.append([Exchange(SESSION, rank, number[rank], 0, True, False, (parts[s],)) for s in range(servers)])
        deliveries = [sent[-1], *random.choices(sent, k=random.randint(0, 2))]
        for messages in deliveries:
            for s in random.sample(range(servers), k=servers):
                cluster.transport.call(s, messages[s], 1.0).wait()
    fetch = Exchange(SESSION, 0, 0, 0, False, True)
    result = torch.cat([cluster.transport.call(s, fetch, 1.0).wait().weights[0] for s in range(servers)])
    assert result.tolist() == total.tolist()
    assert cluster.versions() == [12] * servers


# ---------------------------------------------------------------------- one worker alone


def train(parameters: torch.nn.Parameter, target: torch.Tensor, steps: int, exchanger: Exchanger | None) -> None:
    """Minimise a quadratic whose curvature differs from coordinate to coordinate."""
    curvature = torch.linspace(0.2, 2.0, len(target))
    optimizer = torch.optim.SGD([parameters], lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (curvature * (parameters - target).square()).sum().backward()
        optimizer.step()
        if exchanger is not None:
            exchanger.count_step()
            run(exchanger.advance())


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_one_worker_is_sequential_sgd(servers: int, scale: str) -> None:
    start, target = torch.randn(50), torch.randn(50) + 3.0
    alone, through = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    train(alone, target, 60, None)
    exchanger = Cluster(servers).enter(
        0, {"w": through.data}, nsync=1, advanced=Advanced(overlap=False), algorithm=ASGD(scale)
    )
    train(through, target, 60, exchanger)
    assert exchanger.stats.exchanges == 60
    assert bits(alone.data) == bits(through.data)


@pytest.mark.parametrize("nsync", [1, 4, 7])
def test_one_worker_with_overlap_is_sequential_sgd_too(nsync: int) -> None:
    start, target = torch.randn(50), torch.randn(50) + 3.0
    alone, through = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    train(alone, target, 60, None)
    exchanger = Cluster().enter(0, {"w": through.data}, nsync=nsync)
    train(through, target, 60, exchanger)
    run(exchanger.flush())
    run(exchanger.fetch())
    assert bits(alone.data) == bits(through.data)


class Lone:
    """A worker alone with tensors of several dtypes, which nothing but its own steps may change."""

    def __init__(self, servers: int, **settings: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
        self.tensors = {str(d): torch.randn(37, generator=generator, dtype=torch.float64).to(d) for d in dtypes}
        self.expected = {name: tensor.clone() for name, tensor in self.tensors.items()}
        cluster = Cluster(servers)
        cluster.transport = self.wire = ScriptedTransport([s.handle for s in cluster.services])
        self.exchanger = cluster.enter(0, self.tensors, **settings)
        self.changes = generator

    def train(self) -> None:
        for name, tensor in self.tensors.items():
            # Of all sizes, so that weights, updates and their sums lose digits in every way.
            change = torch.randn(tensor.shape, generator=self.changes, dtype=torch.float64)
            change *= 10.0 ** torch.randint(-9, 2, tensor.shape, generator=self.changes)
            change = torch.where(change.abs() < 1e-8, -tensor.real.double(), change)  # to +0 or -0
            value = (tensor + change.to(tensor.dtype)) * -1
            tensor.copy_(value)
            self.expected[name].copy_(value)
        self.exchanger.count_step()

    def check(self) -> None:
        assert {n: bits(t) for n, t in self.tensors.items()} == {n: bits(t) for n, t in self.expected.items()}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=NEEDS_SHARED_MEMORY)])
@pytest.mark.parametrize(
    "rules",
    [
        {"nsync": 1, "advanced": Advanced(overlap=False)},
        {"nsync": 3},
        {"nsync": 4, "algorithm": ASGD("sum")},
        {"nsync": 2, "advanced": Advanced(nfetch=5)},
        {"algorithm": ASGD(transforms=[StaleSynchronous(1)]), "nsync": 2},
        {"algorithm": ASGD(transforms=[SoftSync()]), "nsync": 2},
        {"algorithm": "local_sgd", "nsync": 3},
    ],
    ids=str,
)
def test_a_worker_alone_keeps_its_own_bits(servers: int, shared: bool, rules: dict[str, Any]) -> None:
    lone = Lone(servers, shared=shared, **rules)
    late = Random(1)
    for step in range(80):
        if step % 37 == 0:
            run(lone.exchanger.begin())
        if rules["nsync"] > 1 and rules.get("algorithm", ASGD("sum")) == ASGD("sum"):
            lone.wire.hold()  # answers come some steps later
            if late.random() < 0.4:
                lone.wire.deliver()
        run(lone.exchanger.advance())
        lone.check()
        lone.train()
        lone.wire.release()
        if step % 11 == 0:
            assert lone.exchanger.catch_up().keys() <= lone.tensors.keys()
            lone.check()
        if step % 37 == 36:
            run(lone.exchanger.flush())
            run(lone.exchanger.fetch(park=True))
            lone.check()
            assert lone.exchanger.changed() == []  # what rounding leaves is no change
    assert lone.exchanger.stats.pushes > 15
    lone.exchanger.close()


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("compression", [None, "bf16"])
def test_a_refused_update_of_a_worker_alone_is_thrown_away(servers: int, compression: str | None) -> None:
    worker = Worker(Cluster(servers), nsync=1, advanced=Advanced(overlap=False), compression=compression)
    worker.step(1.0)
    worker.step(math.nan)
    assert worker.w.tolist() == [1.0] * 4
    run(worker.exchanger.fetch())
    assert worker.refused == 1


# ---------------------------------------------------------------------- for a checkpoint


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("held", [0, 2, 3])
def test_catching_up_brings_the_servers_weights_with_all_steps(overlap: bool, held: int) -> None:
    cluster, transport = scripted(servers=2, workers=2)
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"), advanced=Advanced(overlap=overlap))
    other = Worker(cluster, 1, nsync=1, algorithm=ASGD("sum"), advanced=Advanced(overlap=False))
    other.step(0.75)
    for step in range(3):
        if overlap and step + 1 == held:
            transport.hold()
        worker.step(0.25)
    transport.release()
    found = worker.exchanger.catch_up()["w"]
    assert found.tolist() == [0.75 + 3 * 0.25] * 4
    other.step(1.0)
    assert worker.exchanger.catch_up()["w"].tolist() in ([1.5] * 4, [2.5] * 4)  # what is on its way may be older


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=NEEDS_SHARED_MEMORY)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("rules", [{}, {"advanced": Advanced(nfetch=4)}, {"compression": "bf16"}], ids=str)
def test_catching_up_with_other_weights_in_the_module_loses_no_update(
    rules: dict[str, Any], steps: int, shared: bool
) -> None:
    cluster, transport = scripted(servers=2, workers=2)
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"), shared=shared, **rules)
    other = Worker(cluster, 1, nsync=1, algorithm=ASGD("sum"), advanced=Advanced(overlap=False))
    for _ in range(steps):
        worker.step(0.25)
    other.step(1.0)
    own = worker.w.clone()
    worker.w.fill_(64.0)  # an average over time, for instance
    before = len(pushes(transport))
    worker.exchanger.catch_up()
    assert worker.w.tolist() == [64.0] * 4
    assert len(pushes(transport)) == before
    worker.w.copy_(own)
    other.step(2.0)
    worker.step(0.25)
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch())
    assert worker.w.tolist() == [0.25 * (steps + 1) + 3.0] * 4


def test_catching_up_twice_before_the_answer_is_merged_finds_the_same() -> None:
    worker = Worker(Cluster(1, 2), nsync=1, compression="bf16")
    worker.step(0.25)
    weights = worker.exchanger.catch_up()["w"]
    assert weights.tolist() == worker.exchanger.catch_up()["w"].tolist() == [0.125 + 0.125] * 4
    run(worker.exchanger.advance())
    assert worker.w.tolist() == [0.125 + 0.125] * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_alone_takes_the_weights_that_the_servers_optimizer_has_made(overlap: bool) -> None:
    start = torch.randn(50, generator=torch.Generator().manual_seed(0))
    worker = Worker(
        Cluster(3), 0, start.tolist(), nsync=1, advanced=Advanced(overlap=overlap), algorithm=Downpour(lr=0.1)
    )
    for step in range(20):
        worker.w.grad = change(step).repeat(10)
        worker.step(0.01 * worker.w.grad)
        run(worker.exchanger.advance())
        assert bits(worker.w) == bits(worker.exchanger.peek()["w"])
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch(park=True))
    assert bits(worker.w) == bits(worker.exchanger.peek()["w"])


def test_catching_up_keeps_the_steps_whose_gradients_were_not_pushed() -> None:
    cluster = Cluster(1, 2)
    worker = Worker(cluster, nsync=5, algorithm=Downpour(lr=1.0))
    worker.w.grad = torch.full((4,), 2.0)
    for _ in range(3):
        worker.train(-0.125)
    assert worker.exchanger.catch_up()["w"].tolist() == [-0.375] * 4
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch())
    assert worker.w.tolist() == [-3.0] * 4  # half of three gradients


def test_catching_up_of_elastic_workers_brings_the_centre_and_keeps_their_own_weights() -> None:
    cluster = Cluster(1, 2)
    worker = Worker(cluster, nsync=5, algorithm=EASGD(beta=0.5))
    worker.train(4.0)
    assert worker.exchanger.catch_up()["w"].tolist() == [0.0] * 4  # what it has not pushed is not in the centre
    assert worker.w.tolist() == [4.0] * 4


WAITING = [ASGD("sum", transforms=[StaleSynchronous(0)]), LocalSGD(), StreamingDiLoCo(parts=1)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("algorithm", WAITING, ids=lambda a: type(a).__name__)
def test_catching_up_waits_for_nobody_and_leaves_the_rounds_as_they_are(algorithm: Algorithm, overlap: bool) -> None:
    cluster, transport = scripted(workers=2)
    worker = Worker(cluster, nsync=4, algorithm=algorithm, advanced=Advanced(overlap=overlap))
    for _ in range(3):
        worker.train(1.0)
        before = len(pushes(transport))
        assert worker.exchanger.catch_up()["w"].tolist() == worker.w.tolist()
        assert len(pushes(transport)) == before
    if overlap:
        transport.hold()  # the other one's push is awaited
        worker.step(1.0)
        assert worker.exchanger.catch_up() == {}
        worker.exchanger.close()


STREAMING = {"parts": 1, "momentum": 0.0, "lr": 1.0, "alpha": 0.0}


def test_a_reply_is_merged_after_the_delay_that_was_given_and_not_before() -> None:
    worker = Worker(Cluster(), nsync=4, algorithm=StreamingDiLoCo(delay=2, **STREAMING))
    merged = []
    for _ in range(12):
        worker.step(1.0)
        merged.append(worker.exchanger.stats.exchanges)
    assert merged == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def test_after_the_delay_a_reply_that_is_late_is_not_waited_for() -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=4, algorithm=StreamingDiLoCo(delay=1, **STREAMING))
    transport.hold()
    for _ in range(7):
        worker.step(1.0)
    assert worker.exchanger.stats.exchanges == 0
    worker.exchanger.close()


def test_workers_train_on_while_a_round_lacks_its_quorum_and_a_clock_ends_its_grace_period() -> None:
    now = [0.0]
    cluster = Cluster(1, 3, clock=lambda: now[0])
    rule = DecoupledDiLoCo(quorum=2, **STREAMING)
    workers = [Worker(cluster, rank, nsync=4, algorithm=rule, clock=lambda: now[0]) for rank in range(3)]

    def train(*ranks: int, steps: int) -> None:
        for _ in range(steps):
            now[0] += 1.0
            for rank in ranks:
                workers[rank].step(1.0)

    first = workers[0].exchanger.stats
    train(0, steps=10)
    assert (first.pushes, first.wait_s) == (0, 0.0)  # no round has ended, and none was waited for
    assert first.deferred > 0
    train(1, steps=4)  # a quorum; how fast these workers are is not known yet
    assert cluster.versions() == [1]
    train(0, 1, steps=4)
    assert (first.pushes, cluster.versions()) == (1, [1])
    # Of the four seconds that a period takes, the first has waited three for the second.
    for seconds, version in ((0.9, 1), (0.1, 2)):
        now[0] += seconds
        cluster.services[0].tick()
        assert cluster.versions() == [version]


def test_workers_who_leave_are_left_out_of_the_mean() -> None:
    cluster = Cluster(1, 2)
    worker = Worker(cluster, nsync=1, algorithm=ASGD("mean"), advanced=Advanced(overlap=False))
    worker.step(4.0)
    assert worker.exchanger.peek()["w"].tolist() == [2.0] * 4
    cluster.services[0].handle(Leave(SESSION, 1, "killed"))
    worker.step(4.0)
    assert worker.w.tolist() == worker.exchanger.peek()["w"].tolist() == [6.0] * 4


# ---------------------------------------------------------------------- compression

CODES = ["bf16", "fp16", "int8", "topk"]


@pytest.mark.parametrize("compression", CODES)
@pytest.mark.parametrize("servers", [1, 3])
def test_compressed_exchanges_bring_everything_in_the_end(compression: str, servers: int) -> None:
    cluster = Cluster(servers, 2)
    n, generator = 3000, torch.Generator().manual_seed(0)
    settings = {"nsync": 1, "algorithm": ASGD("sum"), "compression": compression}
    workers = [Worker(cluster, rank, [0.0] * n, **settings) for rank in (0, 1)]
    total = torch.zeros(n)
    for _ in range(5):
        for worker in workers:
            change = torch.randn(n, generator=generator)
            total += change
            worker.step(change)
    for _ in range(80):
        for worker in workers:
            worker.step(0.0)
    for worker in workers:
        run(worker.exchanger.flush())
        run(worker.exchanger.fetch())
    assert torch.equal(workers[0].w, workers[1].w)  # a sync point
    assert torch.allclose(workers[0].w, total, atol=0.05)


@pytest.mark.parametrize("compression", CODES)
def test_statistics_count_the_bytes_that_were_sent(compression: str) -> None:
    n = 100_000
    worker = Worker(Cluster(), 0, [0.0] * n, nsync=1, compression=compression)
    for _ in range(4):
        worker.step(torch.randn(n))
    run(worker.exchanger.advance())
    factor = find_compression(compression).factor  # type: ignore[union-attr]
    record = worker.exchanger.stats.records[-1]
    assert 4 * n / record.bytes_pushed == pytest.approx(factor, rel=0.25)
    assert 4 * n / record.bytes_fetched == pytest.approx(factor, rel=0.25)
    run(worker.exchanger.fetch())
    assert 4 * n / worker.exchanger.stats.records[-1].bytes_fetched == pytest.approx(
        2, rel=0.05
    )  # differences, 16 bits
    run(worker.exchanger.fetch())
    assert worker.exchanger.stats.records[-1].bytes_fetched == 0


@pytest.mark.parametrize("compression", CODES)
@pytest.mark.parametrize("away", [False, True], ids=["", "one comes back before"])
def test_workers_near_and_far_take_the_same_bits_at_sync_points(compression: str, away: bool) -> None:
    cluster, generator = Cluster(2, 3), torch.Generator().manual_seed(0)
    settings = {"nsync": 2, "algorithm": ASGD("sum"), "compression": compression}
    near = [Worker(cluster, 0, [1.0] * 999, shared=True, **settings)]
    far = [Worker(cluster, rank, [2.0] * 999, **settings) for rank in (1, 2)]
    workers = [*near, *far]
    for _ in range(3):
        for worker in workers:
            for _ in range(3):
                worker.step(0.1 * torch.randn(999, generator=generator))
        if away:
            run(far[0].exchanger.come_back())
        for worker in workers:
            run(worker.exchanger.flush())
        for worker in reversed(workers):
            run(worker.exchanger.fetch())
        assert torch.equal(far[0].w, near[0].w)
        assert torch.equal(far[1].w, near[0].w)
        whole = torch.cat([service.session.shards[0].weights[0] for service in cluster.services])
        assert torch.allclose(near[0].w, whole, atol=1e-4)
        for worker in workers:
            run(worker.exchanger.begin())
    sent = far[1].exchanger.stats.records[-1].bytes_fetched
    assert sent < 4 * 999 / 1.9


def test_workers_with_different_codes_take_the_same_bits_at_sync_points() -> None:
    """With "auto" each chooses its own."""
    codes, generator = [None, None, "bf16", "int8", "4bit"], torch.Generator().manual_seed(0)
    cluster = Cluster(2, len(codes))
    workers = [
        Worker(cluster, rank, [1.0] * 999, nsync=2, compression=code, shared=CAN_SHARE and rank == 0)
        for rank, code in enumerate(codes)
    ]
    for _ in range(3):
        for worker in workers:
            for _ in range(3):
                worker.step(0.1 * torch.randn(999, generator=generator))
        for worker in workers:
            run(worker.exchanger.flush())
        for worker in workers:
            run(worker.exchanger.fetch())
        for worker in workers[1:]:
            assert torch.equal(worker.w, workers[0].w)
        for worker in workers:
            run(worker.exchanger.begin())


@pytest.mark.parametrize("compression", CODES)
def test_a_refused_update_leaves_nothing_behind(compression: str) -> None:
    worker = Worker(Cluster(), 0, [0.0] * 500, nsync=1, compression=compression)
    worker.step(torch.randn(500))
    worker.step(math.nan)
    run(worker.exchanger.advance())
    assert worker.refused == 1
    worker.step(torch.ones(500))
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch())
    assert worker.w.isfinite().all()


def trained_with_4_bits(disturb: Callable[[Worker, Cluster], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """The change that was made in one step, and the weights after many more; between them something happens."""
    cluster = Cluster(2)
    worker = Worker(cluster, 0, [0.0] * 500, nsync=1, algorithm=ASGD("sum"), compression="4bit")
    change = torch.randn(500, generator=torch.Generator().manual_seed(0))
    worker.step(change)
    run(worker.exchanger.flush())
    disturb(worker, cluster)
    for _ in range(40):
        worker.step(0.0)
    run(worker.exchanger.flush())
    return change, worker.w


def test_what_a_code_keeps_back_for_a_server_survives_the_refusal_of_another_one() -> None:
    def be_refused(worker: Worker, cluster: Cluster) -> None:
        worker.step(torch.tensor([math.nan] + [0.0] * 499))
        run(worker.exchanger.advance())
        assert worker.refused == 1

    change, weights = trained_with_4_bits(be_refused)
    assert torch.allclose(weights[250:], change[250:], atol=0.02)


def test_what_a_code_keeps_back_survives_a_push_that_a_transform_drops() -> None:
    settings = {"nsync": 1, "algorithm": ASGD("sum", transforms=[DropStale(2)]), "compression": "4bit"}
    cluster = Cluster(1, 2)
    workers = [Worker(cluster, rank, [0.0] * 500, **settings) for rank in range(2)]
    change = torch.randn(500, generator=torch.Generator().manual_seed(0))
    workers[0].step(change)
    run(workers[0].exchanger.advance())
    for _ in range(2):
        workers[1].step(0.0)
        run(workers[1].exchanger.advance())
    workers[0].step(3 * change)  # two versions old
    run(workers[0].exchanger.advance())
    assert cluster.counts("dropped") == [1]
    for _ in range(40):
        workers[0].step(0.0)
    run(workers[0].exchanger.flush())
    assert torch.allclose(workers[0].exchanger.peek()["w"], change, atol=0.02)


def test_what_a_code_keeps_back_survives_that_a_worker_was_away() -> None:
    def be_away(worker: Worker, cluster: Cluster) -> None:
        session = cluster.services[0].session
        assert session is not None
        session.members.suspected[0] = "it sent no heartbeat"

    change, weights = trained_with_4_bits(be_away)
    assert torch.allclose(weights, change, atol=0.02)


def test_a_look_at_the_weights_does_not_disturb_what_both_ends_know() -> None:
    worker = Worker(Cluster(), 0, [0.0] * 500, nsync=1, algorithm=ASGD("sum"), compression="int8")
    total = torch.zeros(500)
    for seed in range(20):
        change = torch.randn(500, generator=torch.Generator().manual_seed(seed))
        total += change
        worker.step(change)
        if seed % 3 == 0:
            assert worker.exchanger.peek()["w"].shape == (500,)
    for _ in range(20):
        worker.step(0.0)
    assert torch.allclose(worker.w, total, atol=0.05)


# ---------------------------------------------------------------------- nsync="auto"


class Network:
    """A transport over which an exchange takes so many seconds of a clock that a test turns."""

    def __init__(self, cluster: Cluster, trip_s: float) -> None:
        self.now, self.trip_s = 0.0, trip_s
        self.under_way: list[tuple[float, Any, Any]] = []
        self.inner = cluster.transport
        self.num_servers = self.inner.num_servers

    def call(self, server: int, message: Any, timeout_s: float) -> Any:
        answer = self.inner.call(server, message, timeout_s)
        if not isinstance(message, Exchange) or not message.push:
            return answer
        future: Any = torch.futures.Future()
        self.under_way.append((self.now + self.trip_s, future, answer))
        return future

    def turn(self, seconds: float) -> None:
        self.now += seconds
        for due, future, answer in [x for x in self.under_way if x[0] <= self.now]:
            before, self.now = self.now, due
            future.set_result(answer.value())
            self.now = before
        self.under_way = [x for x in self.under_way if x[0] > self.now]


def test_auto_exchanges_as_often_as_the_network_allows_and_follows_its_changes() -> None:
    cluster = Cluster()
    network = Network(cluster, trip_s=0.5)
    cluster.transport = network  # type: ignore[assignment]
    worker = Worker(cluster, nsync="auto", clock=lambda: network.now)
    periods = []
    for trip_s in (0.5, 2.0, 0.05):
        network.trip_s = trip_s
        for _ in range(800):
            worker.train(0.0)
            network.turn(0.02)
            run(worker.exchanger.advance())
        periods.append(worker.exchanger.stats.records[-1].local_steps)
    assert periods[0] in (25, 26)
    assert periods[1] in (100, 101)
    assert periods[2] in (3, 4)
    assert worker.exchanger.stats.wait_s == 0
