"""Every collective of torch.distributed's default group, on three workers in threads over the in-process transport."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_fabric.utilities.distributed import _InfiniteBarrier

from lightning_asgd.core.foundation.errors import CollectiveMismatchError, CollectiveUnavailableError
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.worker.collectives import Collectives, Phase
from lightning_asgd.world import ranks as world
from lightning_asgd.world.process_group import GuardedStore, RankInfo, WorkersGroup
from tests.component.test_collectives import together

SIZE = 3


def groups(work: Callable[[Any, int], Any], **place: Any) -> list[Any]:
    """What ``work(group, rank)`` returns on every worker."""

    def run(collectives: Collectives, rank: int) -> Any:
        here = RankInfo(rank, SIZE, rank, SIZE, 0, 1, lambda: collectives, **place)
        return work(WorkersGroup(rank, SIZE, lambda: here), rank)

    return together(SIZE, run)


def vector(rank: int, length: int = 2) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32) + 10 * rank


def options(kind: str, root: int = 0, op: Any = dist.ReduceOp.SUM) -> Any:
    made = getattr(dist.distributed_c10d, kind)()
    if hasattr(made, "rootRank"):
        made.rootRank = root
    if hasattr(made, "reduceOp"):
        made.reduceOp = op
    return made


def test_rank_and_size_follow_the_place() -> None:
    place = RankInfo(2, 5, 0, 1, 0, 1, Collectives)
    group = WorkersGroup(0, 1, lambda: place)
    assert (group.rank(), group.size()) == (2, 5)
    place.rank, place.world_size = 0, 4
    assert (group.rank(), group.size()) == (0, 4)


def test_broadcast() -> None:
    def work(group: Any, rank: int) -> Any:
        tensors = [vector(rank), torch.tensor(rank)]
        assert group.broadcast(tensors, options("BroadcastOptions", 1)).wait()
        return [t.tolist() for t in tensors]

    assert groups(work) == [[[10.0, 11.0], 1]] * SIZE


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("SUM", [30, 33]),
        ("AVG", [10, 11]),
        ("MAX", [20, 21]),
        ("MIN", [0, 1]),
        ("PRODUCT", [0, 231]),
        ("BAND", [0, 1]),
        ("BOR", [30, 31]),
        ("BXOR", [30, 31]),
    ],
)
def test_all_reduce(op: str, expected: list[int]) -> None:
    def work(group: Any, rank: int) -> Any:
        tensor = vector(rank).long()
        work = group.allreduce([tensor], options("AllreduceOptions", op=getattr(dist.ReduceOp, op)))
        assert work.wait()
        assert work.get_future().value()[0] is tensor
        return tensor.tolist()

    assert groups(work) == [expected] * SIZE


def test_reduce_changes_the_root_only() -> None:
    def work(group: Any, rank: int) -> Any:
        tensor = vector(rank)
        group.reduce([tensor], options("ReduceOptions", 2))
        return tensor.tolist()

    assert groups(work) == [[0.0, 1.0], [10.0, 11.0], [30.0, 33.0]]


def test_all_gather() -> None:
    def work(group: Any, rank: int) -> Any:
        outputs = [torch.zeros(2) for _ in range(SIZE)]
        group.allgather([outputs], [vector(rank)], options("AllgatherOptions"))
        single = torch.zeros(SIZE, 2)
        group.all_gather_single(single, vector(rank), options("AllgatherOptions"))
        return [t.tolist() for t in outputs], single.tolist()

    everybody = [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]
    assert groups(work) == [(everybody, everybody)] * SIZE


def test_gather_and_scatter() -> None:
    def work(group: Any, rank: int) -> Any:
        outputs = [[torch.zeros(2) for _ in range(SIZE)]] if rank == 1 else []
        group.gather(outputs, [vector(rank)], options("GatherOptions", 1))
        mine = torch.zeros(2)
        group.scatter([mine], [outputs[0][::-1]] if rank == 1 else [], options("ScatterOptions", 1))
        return mine.tolist()

    assert groups(work) == [[20.0, 21.0], [10.0, 11.0], [0.0, 1.0]]


def test_reduce_scatter() -> None:
    def work(group: Any, rank: int) -> Any:
        output, single = torch.zeros(1), torch.zeros(1)
        parts = list(vector(rank, SIZE).split(1))
        group.reduce_scatter([output], [parts], options("ReduceScatterOptions"))
        group.reduce_scatter_single(single, vector(rank, SIZE), options("ReduceScatterOptions"))
        return output.item(), single.item()

    assert groups(work) == [(30.0, 30.0), (33.0, 33.0), (36.0, 36.0)]


def test_all_to_all() -> None:
    def work(group: Any, rank: int) -> Any:
        outputs = [torch.zeros(1) for _ in range(SIZE)]
        group.alltoall(outputs, list(vector(rank, SIZE).split(1)), options("AllToAllOptions"))
        single = torch.zeros(SIZE)
        group.all_to_all_single(single, vector(rank, SIZE), [], [], options("AllToAllOptions"))
        uneven = torch.zeros(rank + rank + rank)  # everybody sends r values to rank r
        sent = torch.full((SIZE,), float(rank))
        group.all_to_all_single(uneven, sent, [rank] * SIZE, [0, 1, 2], options("AllToAllOptions"))
        return [t.item() for t in outputs], single.tolist(), uneven.tolist()

    columns = [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0], [2.0, 12.0, 22.0]]
    uneven = [[], [0.0, 1.0, 2.0], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]]
    assert groups(work) == [(columns[r], columns[r], uneven[r]) for r in range(SIZE)]


UNEVEN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all_gather": lambda g, t: g.allgather(
        [[torch.zeros_like(t) for _ in range(SIZE)]], [t], options("AllgatherOptions")
    ),
    "all_gather_into_tensor": lambda g, t: g.all_gather_single(
        torch.zeros(SIZE * len(t)), t, options("AllgatherOptions")
    ),
    "gather": lambda g, t: g.gather(
        [[torch.zeros_like(t) for _ in range(SIZE)]], [t], options("GatherOptions", g.rank())
    ),
}


@pytest.mark.parametrize("call", UNEVEN)
def test_tensors_of_different_shapes_are_named_with_their_ranks(call: str) -> None:
    def work(group: Any, rank: int) -> Any:
        with pytest.raises(CollectiveMismatchError) as error:
            UNEVEN[call](group, torch.ones(3 - rank))
        return str(error.value)

    for text in groups(work):
        expected = "was given tensors of different shapes: (3,) by worker 0, (2,) by worker 1, (1,) by worker 2."
        assert f"torch.distributed.{call} {expected}" in text
        assert 'data="split"' in text


def test_outputs_of_the_sizes_that_ranks_send_are_filled() -> None:
    def work(group: Any, rank: int) -> Any:
        outputs = [torch.zeros(length) for length in (1, 2, 3)]
        group.allgather([outputs], [vector(rank, 1 + rank)], options("AllgatherOptions"))
        return [t.tolist() for t in outputs]

    assert groups(work) == [[[0.0], [10.0, 11.0], [20.0, 21.0, 22.0]]] * SIZE


def test_an_output_of_another_size_is_named() -> None:
    def work(group: Any, rank: int) -> Any:
        length = 2 if rank == 0 else 3
        if rank == 0:
            return group.broadcast([torch.ones(length)], options("BroadcastOptions")).wait()
        with pytest.raises(CollectiveMismatchError, match=r"broadcast was given outputs of shapes \[\(3,\)\]"):
            group.broadcast([torch.ones(length)], options("BroadcastOptions"))
        return True

    assert groups(work) == [True] * SIZE


CALLS: dict[str, Callable[[Any], Any]] = {
    "barrier": lambda g: g.barrier(),
    "broadcast": lambda g: g.broadcast([torch.ones(1)], options("BroadcastOptions")),
    "all_reduce": lambda g: g.allreduce([torch.ones(1)], options("AllreduceOptions")),
    "all_gather": lambda g: g.allgather([[torch.ones(1)] * 3], [torch.ones(1)], options("AllgatherOptions")),
    "send": lambda g: g.send([torch.ones(1)], 1, 0),
    "recv": lambda g: g.recv([torch.ones(1)], 1, 0),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", ["asynchronous phase", "elastic run", "DataLoader"])
def test_what_cannot_be_served_raises_at_once_and_by_name(call: str, where: str) -> None:
    def work(group: Any, rank: int) -> Any:
        begun = time.monotonic()
        with pytest.raises(CollectiveUnavailableError, match=rf"torch.distributed.{call} was called") as error:
            CALLS[call](group)
        assert time.monotonic() - begun < 5
        return str(error.value)

    def run(collectives: Collectives, rank: int) -> Any:
        collectives.phase = Phase.ASYNC if where == "asynchronous phase" else Phase.SYNC
        here = RankInfo(rank, SIZE, rank, SIZE, 0, 1, lambda: collectives, meets=where != "elastic run")
        here.forked = where == "DataLoader"
        return work(WorkersGroup(rank, SIZE, lambda: here), rank)

    for text in together(SIZE, run):
        assert where in text or call in ("send", "recv")  # which are never served
        assert "Expected" in text


def test_a_group_of_one_rank_needs_nobody() -> None:
    group = WorkersGroup(0, 1)
    tensor, output = vector(1), torch.zeros(2)
    group.barrier()
    group.allreduce([tensor], options("AllreduceOptions"))
    group.broadcast([tensor], options("BroadcastOptions"))
    group.all_gather_single(output, tensor, options("AllgatherOptions"))
    assert tensor.tolist() == output.tolist() == [10.0, 11.0]


def test_a_rank_that_is_gone_is_named_where_it_is_needed_and_not_waited_for_elsewhere() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        here = RankInfo(rank, SIZE, rank, SIZE, 0, 1, lambda: collectives)
        group = WorkersGroup(rank, SIZE, lambda: here)
        if rank == 1:
            assert collectives.client is not None
            collectives.client.leave()
            return None
        tensor = vector(rank)
        group.allreduce([tensor], options("AllreduceOptions"))
        with pytest.raises(CollectiveUnavailableError, match=r"all_gather needs every rank, but ranks \[1\] are lost"):
            group.allgather([[torch.zeros(2)] * SIZE], [tensor], options("AllgatherOptions"))
        return tensor.tolist()

    assert together(SIZE, work) == [[20.0, 22.0], None, [20.0, 22.0]]


def test_a_group_of_another_backend_is_refused_where_workers_do_not_meet() -> None:
    collectives = Collectives()
    collectives.phase = Phase.ASYNC
    place = RankInfo(0, 2, 0, 2, 0, 1, lambda: collectives, store=dist.HashStore)
    store = GuardedStore(lambda: place)
    with pytest.raises(CollectiveUnavailableError, match="where A-SGD workers do not synchronise"):
        store.set("key", "value")
    collectives.phase = Phase.SYNC
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("number", 2) == 2


@pytest.fixture
def first_of_three() -> Iterator[RankInfo]:
    """This process is the first of three workers, whose messages are encrypted."""
    place = RankInfo(0, SIZE, 0, SIZE, 0, 1, Collectives, store=dist.HashStore, encrypted=True)
    world.announce(place)
    yield place
    world.withdraw()
    os.environ.pop(rank_variables.OWNER_ENV, None)  # a worker's process ends with it


def test_what_nothing_would_encrypt_is_refused(first_of_three: RankInfo) -> None:
    with pytest.raises(CollectiveUnavailableError, match=r"new_group\(\[0, 1\]\).*transport='zmq' there are no others"):
        dist.new_group([0, 1], backend="gloo")
    with pytest.raises(CollectiveUnavailableError, match="with transport='zmq', but its traffic would not"):
        dist.new_group(backend="cpu:gloo,cuda:gloo")
    for ranks in (None, [0, 1, 2], [0]):
        assert dist.get_backend(dist.new_group(ranks, backend="gloo")) == "asgd"
    assert dist.get_backend(dist.new_group(backend=dist.Backend.GLOO)) == "asgd"
    first_of_three.encrypted = False
    with pytest.raises(CollectiveUnavailableError, match=r"Give new_group\(ranks=\[0, 1\], backend='gloo'\)"):
        dist.new_group([0, 1])
    assert dist.get_backend(dist.new_group([0], backend="gloo")) == "gloo"


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("meets", [True, False])
def test_lightnings_barrier_around_prepare_data(encrypted: bool, meets: bool) -> None:
    """It makes a group of gloo's with a time-out of its own, and destroys it. In an elastic run it waits for none."""
    place = RankInfo(0, SIZE, 0, SIZE, 0, 1, Collectives, meets=meets, store=dist.HashStore, encrypted=encrypted)
    world.announce(place)
    try:
        refused: Any = pytest.raises(CollectiveUnavailableError, match="lost its job") if meets else nullcontext()
        with refused, _InfiniteBarrier() as barrier:
            barrier()
    finally:
        world.withdraw()
        os.environ.pop(rank_variables.OWNER_ENV, None)


def test_all_workers_wait_for_the_one_that_prepares_the_data() -> None:
    order: list[str] = []

    def work(group: Any, rank: int) -> None:
        if rank == 0:
            time.sleep(0.2)
            order.append("prepared")
        group.monitored_barrier()
        order.append("trains")

    groups(work)
    assert order == ["prepared", *["trains"] * SIZE]
