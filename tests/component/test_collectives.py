from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_asgd.core.foundation.errors import ASGDError, CollectiveMismatchError, WorkerLostError
from lightning_asgd.core.protocol import Contribution, Policy, Reduced
from lightning_asgd.core.worker.collectives import Collectives, Phase, reduce_op_name
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.synchronizer import run
from tests.helpers.cluster import Cluster, run_workers


def together(workers: int, function: Callable[[Collectives, int], Any]) -> list[Any]:
    """Run a function on so many workers, each in its own thread. One that raises leaves, as the strategy sees to."""
    cluster = Cluster(1, workers)
    clients = [cluster.client(rank) for rank in range(workers)]
    for client in clients:
        client.join()

    def work(rank: int) -> Any:
        try:
            return function(Collectives(clients[rank], timeout_s=20.0), rank)
        except BaseException as error:
            clients[rank].leave(f"it raised {error}")
            raise

    return run_workers(workers, work)


def offline() -> Collectives:
    return Collectives()


def asynchronous() -> Collectives:
    client = Cluster(1, 3).client(1)
    client.join()
    collectives = Collectives(client)
    collectives.phase = Phase.ASYNC
    return collectives


def alone() -> Collectives:
    client = Cluster(1, 1).client()
    client.join()
    return Collectives(client)


@pytest.mark.parametrize(("make", "rank"), [(offline, 0), (asynchronous, 1), (alone, 0)])
def test_collectives_are_local_where_nobody_else_is_reached(make: Callable[[], Collectives], rank: int) -> None:
    c = make()
    tensor = torch.tensor([1.0, 2.0])
    assert not c.real
    c.barrier("x")
    assert c.broadcast("mine", source=0) == "mine"
    assert c.gather("gather", "x", "mine") == {rank: "mine"}
    assert c.gather("gather", "x", "mine", target=0) == {rank: "mine"}
    assert c.reduce(tensor, "sum") is tensor
    assert c.all_gather(tensor)[0] is tensor
    assert c.decide(True)
    assert not c.decide(False, all=False)


def test_phases() -> None:
    assert offline().phase is Phase.OFFLINE
    client = Cluster(1, 2).client()
    c = Collectives(client)
    assert c.phase is Phase.SYNC
    assert c.real
    c.phase = Phase.ASYNC
    assert not c.real


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("source", [0, 1])
def test_broadcast(workers: int, source: int) -> None:
    results = together(workers, lambda c, rank: c.broadcast({"rank": rank, "t": torch.ones(2) * rank}, source))
    assert [r["rank"] for r in results] == [source] * workers
    assert [r["t"].tolist() for r in results] == [[source] * 2] * workers


def test_none_can_be_broadcast() -> None:
    assert together(2, lambda c, rank: c.broadcast(None if rank == 0 else "x")) == [None, None]


def test_a_barrier_is_passed_by_nobody_before_all_have_come() -> None:
    arrived: list[int] = []

    def work(c: Collectives, rank: int) -> int:
        arrived.append(rank)
        c.barrier("x")
        return len(arrived)

    assert together(3, work) == [3, 3, 3]


def test_gather_to_one() -> None:
    results = together(3, lambda c, rank: c.gather("gather", "x", rank * 10, target=1))
    assert results == [{}, {0: 0, 1: 10, 2: 20}, {}]


FLOATS = [[1.0, -2.0], [3.0, 5.0], [2.0, 0.0]]
INTS = [[1, -2], [3, 5], [3, 0]]


@pytest.mark.parametrize(
    ("op", "floats", "ints"),
    [
        ("mean", [2.0, 1.0], [pytest.approx(7 / 3), 1]),  # Lightning divides sums by mean batch sizes: 27 and 10
        ("sum", [6.0, 3.0], [7, 3]),
        ("max", [3.0, 5.0], [3, 5]),
        ("min", [1.0, -2.0], [1, -2]),
        ("product", [6.0, 0.0], [9, 0]),
    ],
)
def test_reduce(op: str, floats: list[float], ints: list[int]) -> None:
    def work(c: Collectives, rank: int) -> Any:
        mine = torch.tensor(FLOATS[rank])
        result = c.reduce(mine, op, "x")
        assert mine.tolist() == FLOATS[rank]  # the argument is left alone
        return [result, c.reduce(torch.tensor(INTS[rank]), op), c.reduce(torch.tensor(INTS[rank][0]), op)]

    for f, i, scalar in together(3, work):
        assert f.tolist() == floats
        assert f.dtype is torch.float32
        assert i.tolist() == ints
        assert i.dtype is (torch.float32 if op == "mean" else torch.int64)
        assert scalar.item() == ints[0]
        assert scalar.dim() == 0


@pytest.mark.parametrize("op", ["mean", "max", "min"])
def test_reduce_of_flags(op: str) -> None:
    results = together(2, lambda c, rank: c.reduce(torch.tensor([True, rank == 0]), op))
    assert all(r.dtype is torch.bool for r in results)
    assert [r.tolist() for r in results] == [[True, op == "max"]] * 2


def test_reduce_carries_no_gradients() -> None:
    results = together(2, lambda c, rank: c.reduce(torch.ones(1, requires_grad=True) * 2))
    assert [r.requires_grad for r in results] == [False, False]


def test_all_gather_of_different_shapes() -> None:
    results = together(3, lambda c, rank: c.all_gather(torch.full((rank,), rank, dtype=torch.float64)))
    for result in results:
        assert [t.tolist() for t in result] == [[], [1.0], [2.0, 2.0]]
        assert {t.dtype for t in result} == {torch.float64}


def test_stacked_tensors_have_one_shape() -> None:
    results = together(2, lambda c, rank: c.stacked(torch.tensor([rank, 5])).tolist())
    assert results == [[[0, 5], [1, 5]]] * 2


def test_stacked_tensors_of_different_shapes_raise_on_every_worker() -> None:
    def work(c: Collectives, rank: int) -> str:
        with pytest.raises(CollectiveMismatchError) as error:
            c.stacked(torch.zeros(3 - rank, 2))
        c.barrier()  # the workers go on together
        return str(error.value)

    for text in together(2, work):
        assert "all_gather was given tensors of different shapes: (3, 2) by worker 0, (2, 2) by worker 1" in text
        assert 'data="split"' in text
        assert "sync_dist=True" in text
        assert 'dist_reduce_fx="cat"' in text


@pytest.mark.parametrize(
    ("votes", "everybody", "anybody"),
    [([True, True], True, True), ([True, False], False, True), ([False, False], False, False)],
)
def test_decide(votes: list[bool], everybody: bool, anybody: bool) -> None:
    results = together(2, lambda c, rank: (c.decide(votes[rank]), c.decide(votes[rank], all=False)))
    assert results == [(everybody, anybody)] * 2


def test_different_calls_fail_on_both_sides() -> None:
    caught: dict[int, str] = {}

    def work(c: Collectives, rank: int) -> None:
        try:
            c.barrier("left") if rank == 0 else c.broadcast("x", name="right")
        except CollectiveMismatchError as error:
            caught[rank] = str(error)

    together(2, work)
    assert set(caught) == {0, 1}
    for text in caught.values():
        assert "barrier 'left'" in text
        assert "broadcast 'right'" in text


def test_a_worker_that_raises_does_not_leave_the_others_waiting() -> None:
    seen: dict[int, Any] = {}

    def work(c: Collectives, rank: int) -> None:
        if rank == 2:
            raise ASGDError("on purpose")
        seen[rank] = c.gather("gather", "x", rank)

    with pytest.raises(ASGDError, match="on purpose"):
        together(3, work)
    assert seen == {0: {0: 0, 1: 1}, 1: {0: 0, 1: 1}}


def test_when_worker_zero_raises_the_others_are_told() -> None:
    seen: dict[int, str] = {}

    def work(c: Collectives, rank: int) -> None:
        if rank == 0:
            raise ASGDError("on purpose")
        try:
            c.barrier("x")
        except WorkerLostError as error:
            seen[rank] = str(error)

    with pytest.raises(ASGDError, match="on purpose"):
        together(3, work)
    assert set(seen) == {1, 2}
    assert all("Worker 0" in text for text in seen.values())
    assert all("on purpose" in text for text in seen.values())


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (None, "mean"),
        ("mean", "mean"),
        ("avg", "mean"),
        ("AVG", "mean"),
        ("sum", "sum"),
        ("max", "max"),
        ("min", "min"),
        ("prod", "product"),
        ("product", "product"),
        (ReduceOp.SUM, "sum"),
        (ReduceOp.AVG, "mean"),
        (ReduceOp.MAX, "max"),
        (ReduceOp.MIN, "min"),
        (ReduceOp.PRODUCT, "product"),
    ],
)
def test_names_of_reductions(op: Any, name: str) -> None:
    assert reduce_op_name(op) == name


@pytest.mark.parametrize("op", ["median", "", ReduceOp.PREMUL_SUM, 3])
def test_an_unknown_reduction_is_refused(op: Any) -> None:
    with pytest.raises(ValueError, match=r"is unknown. Expected one of 'mean', 'sum', 'max', 'min', 'product'"):
        reduce_op_name(op)


def test_an_answer_tells_that_somebody_waits_who_trains_no_more() -> None:
    cluster = Cluster(1, 2)
    zero, _ = (cluster.enter(rank, {"w": torch.zeros(2)}, nsync=1) for rank in range(2))
    collectives = Collectives(zero.client, 10.0)
    for stops in (False, True):
        mine = Contribution("test", 1, 1 + stops, "sync point", "epoch end", stops=stops)
        theirs = cluster.transport.call(0, mine, 10.0)
        run(zero.fetch())
        assert collectives.others_stopped is stops
        collectives.contribute("sync point", "epoch end")
        assert theirs.done()
        assert not collectives.others_stopped
        run(zero.fetch())
        assert not collectives.others_stopped


def test_the_value_of_the_chief_is_that_of_the_next_one_when_it_is_gone() -> None:
    cluster = Cluster(1, 3)
    policy = Policy(another_chief=True)
    clients = [SessionClient(cluster.client(rank).connection, policy=policy) for rank in range(3)]
    for client in clients:
        client.join()
    before = [Collectives(client, timeout_s=20.0) for client in clients]
    followed: list[int] = []
    for rank, each in enumerate(before):
        each.on_chief = lambda rank=rank: followed.append(rank)  # type: ignore[misc]
    assert run_workers(3, lambda rank: before[rank].broadcast_of_chief(f"of {rank}")) == ["of 0"] * 3
    clients[0].leave("it was killed")

    def others(place: int) -> tuple[str, int]:
        c = before[place + 1]
        said = c.broadcast_of_chief(f"of {place + 1}")
        gathered = c.gather("gather", "states", place, target=c.chief)
        assert gathered == ({1: 0, 2: 1} if c.rank == c.chief else {})
        return said, c.chief

    assert run_workers(2, others) == [("of 1", 1)] * 2
    assert sorted(followed) == [1, 2]
    clients[1].leave("it was killed")
    assert before[2].broadcast_of_chief("of 2") == "of 2"
    assert before[2].chief == 2


def test_a_broadcast_of_a_worker_that_is_gone_still_fails() -> None:
    cluster = Cluster(1, 2)
    clients = [SessionClient(cluster.client(rank).connection, policy=Policy(another_chief=True)) for rank in range(2)]
    for client in clients:
        client.join()
    clients[0].leave("it was killed")
    with pytest.raises(WorkerLostError, match="worker 0, whose value is needed, is lost"):
        Collectives(clients[1], timeout_s=20.0).broadcast("mine", source=0)


def test_what_a_caller_does_to_a_result_does_not_change_what_is_sent_to_a_restored_server() -> None:
    def work(c: Collectives, rank: int) -> list[Tensor]:
        assert c.client is not None
        c.client.connection.restorer = Mock()
        kept = []
        for call in (
            lambda: c.reduce(torch.ones(1), "sum"),
            lambda: c.broadcast(torch.full((1,), 2.0)),
            lambda: c.all_gather(torch.full((1,), 2.0))[0],
        ):
            call().mul_(100)
            _, answer = c._answers[c.answered]
            kept.append(answer.value[0] if isinstance(answer, Reduced) else answer[0])
        return kept

    assert together(2, work) == [[torch.tensor([2.0])] * 3] * 2
