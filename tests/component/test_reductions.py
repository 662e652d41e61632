"""Collectives that the coordinator reduces: the bits, late workers, lost servers, values of other kinds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_asgd.core.foundation.errors import CollectiveMismatchError
from lightning_asgd.core.protocol import (
    Contribution,
    Failure,
    JointReport,
    Place,
    Policy,
    Ranks,
    Reduced,
    SyncReport,
    WorkerMetrics,
    codec,
)
from lightning_asgd.core.protocol.field_types import checked
from lightning_asgd.core.protocol.reductions import TENSOR_REDUCTIONS, reduce
from lightning_asgd.core.server.collective_table import CollectiveTable
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.collectives import Collectives
from tests.component.test_collectives import together
from tests.component.test_coordinator import coordinator, errors, pass_time, say, succession, successor, values, watched
from tests.helpers.cluster import Cluster

# ---------------------------------------------------------------------- what came before, kept to compare bits

BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda parts: parts.sum(0) / len(parts),
    "sum": lambda parts: parts.sum(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
    "band": lambda parts: functools.reduce(torch.bitwise_and, parts),
    "bor": lambda parts: functools.reduce(torch.bitwise_or, parts),
    "bxor": lambda parts: functools.reduce(torch.bitwise_xor, parts),
}


def before(op: str, parts: list[Tensor]) -> Tensor:
    """What every worker did with all workers' tensors until the coordinator reduced them."""
    result = BEFORE[op](torch.stack(parts))
    if parts[0].dtype is torch.bool:
        return result.floor().bool() if op == "mean" else result.bool()
    return result if op == "mean" else result.to(parts[0].dtype)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
SHAPES = [(), (1,), (7,), (3, 5), (257,), (0,)]


def parts_of(workers: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(workers)
    if dtype is torch.bool:
        return [torch.rand(shape, generator=generator) > 0.3 for _ in range(workers)]
    if dtype in INTEGERS:
        return [torch.randint(0, 100, shape, generator=generator).to(dtype) for _ in range(workers)]
    scales = [10.0 ** (rank % 7 - 3) for rank in range(workers)]
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype) for scale in scales]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 33])
def test_a_reduction_has_the_bits_that_it_had_on_the_workers_in_every_order(workers: int, dtype: torch.dtype) -> None:
    for op, shape in itertools.product(TENSOR_REDUCTIONS, SHAPES):
        parts = parts_of(workers, dtype, shape)
        try:
            expected = bits(before(op, parts))
        except (RuntimeError, NotImplementedError):  # torch has none for these numbers
            expected = None
        orders = (
            list(itertools.permutations(range(workers))) if workers <= 3 else [range(workers), range(workers)[::-1]]
        )
        for order in orders:
            c = coordinator(workers)
            due: list[Completion] = []
            for rank in order:
                assert not due
                due = c.contribute(say(rank, reduction=op, payload=[parts[rank]]), 0.0)
            if expected is None:
                assert {type(error) for error in errors(due).values()} == {CollectiveMismatchError}
                continue
            replies = values(due)
            assert len(replies) == workers
            assert all(reply is replies[0] for reply in replies.values()), "one result for all"
            (result,) = replies[0].value
            assert bits(result) == expected, (op, shape)
            assert list(replies[0].ranks) == list(range(workers))


def test_a_result_and_what_is_sent_of_it_do_not_grow_with_the_workers() -> None:
    sizes = set()
    for workers in (4, 100):
        c = coordinator(workers)
        for rank in range(workers):
            due = c.contribute(say(rank, reduction="sum", payload=[torch.ones(8)]), 0.0)
        header, buffers = codec.encode(values(due)[0])
        sizes.add(len(header) + sum(len(buffer) for buffer in buffers))
    assert max(sizes) - min(sizes) <= 1, "a digit more of the last rank"


@pytest.mark.parametrize(
    ("how", "payloads", "expected"),
    [
        ("all", [True, True], True),
        ("all", [True, False], False),
        ("any", [False, False], False),
        ("any", [False, True], True),
        ("same", ["a", "a", "a"], True),
        ("same", ["a", "b", "a"], False),
        ("same", [b"x"], True),
        ("given", [None, "b", "c"], "b"),
        ("given", [None, None], None),
    ],
)
def test_other_reductions(how: str, payloads: list[Any], expected: Any) -> None:
    assert reduce(how, dict(enumerate(payloads))) == Reduced(expected, Ranks(((0, len(payloads) - 1),)))


# ---------------------------------------------------------------------- reports at sync points


def report(**fields: Any) -> SyncReport:
    return SyncReport(**{"moved": False, "should_stop": False, "grown": False, "checkpoints": None, **fields})


def test_reports_come_to_one() -> None:
    reports = {
        0: report(checkpoints=["files"], place=Place(True, False, 5, 3), versions=(3,)),
        1: report(moved=True, grown=True, place=Place(False, True, 4, 7), versions=(3,)),
        3: report(should_stop=True, trained=True, place=Place(True, False, 1, 1), versions=(3,)),
    }
    assert reduce("report", reports) == Reduced(
        JointReport(
            Ranks(((0, 1), (3, 3))),
            moved=True,
            should_stop=True,
            grown=Ranks(((1, 1),)),
            trained=True,
            checkpoints=["files"],
            versions=(3,),
            place=Place(ends=False, validates=True, step=5, batches=7),
        ),
        Ranks(((0, 1), (3, 3))),
    )


@pytest.mark.parametrize("versions", [[(3,), (4,)], [(3,), None], [None, None]])
def test_versions_are_those_of_all_or_none(versions: list[Any]) -> None:
    reports = {rank: report(versions=each) for rank, each in enumerate(versions)}
    assert reduce("report", reports).value.versions is None


def test_the_metrics_of_all_are_for_the_chief_alone() -> None:
    c = coordinator(3)
    metrics = [WorkerMetrics(samples=rank) for rank in range(3)]
    for rank in (2, 0, 1):
        figures = metrics[rank] if rank != 1 else None
        due = c.contribute(say(rank, reduction="report", payload=report(figures=figures)), 0.0)
    replies = values(due)
    assert replies[0].value.figures == {0: metrics[0], 2: metrics[2]}
    assert replies[1] is replies[2]
    assert replies[1].value.figures == {}


def test_the_next_chief_gets_them_once_the_chief_is_gone() -> None:
    c = succession(3)
    for rank in (1, 2):
        c.contribute(say(rank, reduction="report", payload=report(figures=WorkerMetrics(samples=rank))), 0.0)
    replies = values(c.leave(0, "killed"))
    assert set(replies[1].value.figures) == {1, 2}
    assert replies[2].value.figures == {}
    assert c.members.chief == 1


# ---------------------------------------------------------------------- who is waited for, and who is late


def test_a_worker_that_leaves_while_it_waits_does_not_count() -> None:
    c = coordinator(3)
    for rank in (0, 2):
        c.contribute(say(rank, reduction="sum", payload=[torch.tensor(10**rank)]), 0.0)
    c.leave(2, "killed")
    due = c.contribute(say(1, reduction="sum", payload=[torch.tensor(10)]), 0.0)
    replies = values([completion for completion in due if completion.request.worker != 2])
    assert [int(reply.value[0]) for reply in replies.values()] == [11, 11]
    assert replies[0].ranks == Ranks(((0, 1),))


def test_a_suspended_worker_gets_the_reduced_result_later() -> None:
    c = watched(3)
    pass_time(c, 11, 0, 2)
    for rank in (0, 2):
        due = c.contribute(say(rank, reduction="any", payload=rank == 2), 11.0)
    result = Reduced(True, Ranks(((0, 0), (2, 2))))
    assert values(due) == {0: result, 2: result}
    c.join(1, 12.0)
    assert values(c.contribute(say(1, reduction="any", payload=False), 12.0)) == {1: result}
    assert not c._missed


def test_a_late_worker_that_reduces_otherwise_is_told_so() -> None:
    c = watched(2)
    pass_time(c, 11, 0)
    c.contribute(say(0, reduction="any", payload=True), 11.0)
    c.join(1, 12.0)
    (error,) = errors(c.contribute(say(1, reduction="all", payload=True), 12.0)).values()
    assert isinstance(error, CollectiveMismatchError)


def test_a_reduced_result_that_only_some_know_is_that_of_all_after_a_server_was_lost() -> None:
    c = successor(3, answered=4)
    result = Reduced([torch.tensor(7.0)], Ranks(((0, 2),)))
    assert c.contribute(say(1, 4, reduction="sum", payload=[torch.tensor(1.0)]), 0.0) == []
    due = c.contribute(say(2, 4, reduction="sum", payload=None, answer=result), 0.0)
    assert values(due) == {1: result, 2: result}
    assert values(c.contribute(say(0, 4, reduction="sum", payload=[torch.tensor(1.0)]), 0.0)) == {0: result}


def test_the_chief_is_agreed_with_a_reduced_result() -> None:
    c = succession(3)
    c.leave(0, "killed")
    for rank in (1, 2):
        c.contribute(say(rank, reduction="any", payload=False), 0.0)
    assert c.members.agreed_chief == 1


EVENTS = st.lists(
    st.tuples(st.sampled_from(["call", "leave", "sleep", "wake", "time"]), st.integers(0, 5)), max_size=60
)


@given(EVENTS)
@settings(max_examples=150, deadline=None)
def test_whom_a_collective_waits_for_is_what_the_membership_says(events: list[tuple[str, int]]) -> None:
    """The short way that :meth:`CollectiveTable._waits` takes, beside the definition."""
    c = CollectiveTable(Membership("7.1", 6, Policy(silence_s=10.0, another_chief=True)))
    for rank in range(6):
        c.join(rank, 0.0)
    now, called, asleep = 0.0, dict.fromkeys(range(6), 0), set[int]()
    for what, rank in events:
        if what == "time":
            for _ in range(11):
                now += 1
                for worker in set(range(6)) - asleep:
                    c.members.note_heartbeat(worker, now)
                c.expire(now)
        elif what == "leave":
            c.leave(rank, "killed")
        elif what == "sleep":
            asleep.add(rank)
        elif what == "wake" and rank in asleep and rank not in c.members.left:
            asleep.discard(rank)
            c.members.note_heartbeat(rank, now)
            c.join(rank, now)
        elif what == "call" and rank not in asleep and rank not in c.members.left:
            open_one = next((o for o in c._operations.values() if rank in o.contributions), None)
            called[rank] += open_one is None
            c.contribute(say(rank, called[rank], payload=rank), now)
        for operation in c._operations.values():
            assert not c.members.awaited <= set(operation.contributions), "it could be completed"
        for worker in range(-1, 8):
            assert c._is_awaited(worker) == (worker in c.members.awaited)


# ---------------------------------------------------------------------- on workers, and what is not reducible


def test_tensors_of_other_shapes_fail_on_all_workers_with_the_reason() -> None:
    def work(c: Collectives, rank: int) -> str:
        with pytest.raises(CollectiveMismatchError) as error:
            c.reduce(torch.ones(2 + rank), "sum", "loss")
        return str(error.value)

    for text in together(2, work):
        assert "reduce 'loss' (collective 1" in text
        assert "could not be reduced by 'sum': stack expects each tensor to be equal size" in text
        assert "Expected every worker to give values of the same kind and shape" in text


def test_other_reductions_of_the_same_name_are_a_mismatch() -> None:
    def work(c: Collectives, rank: int) -> str:
        with pytest.raises(CollectiveMismatchError) as error:
            c.reduce(torch.ones(1), ("sum", "max")[rank], "loss")
        return str(error.value)

    for text in together(2, work):
        assert "reduce 'loss' by 'sum'" in text
        assert "reduce 'loss' by 'max'" in text


@pytest.mark.parametrize("reduction", ["median", "sum", "report", "all", "same", "given"])
@pytest.mark.parametrize("payload", [None, 3, [1, 2], {}, [torch.ones(2)], float("nan"), "x", b"y"])
def test_what_a_broken_worker_gives_to_reduce_breaks_no_server(reduction: str, payload: Any) -> None:
    cluster = Cluster(1, 2)
    for rank in range(2):
        cluster.client(rank).join()
    service: Service = cluster.services[0]
    kinds: list[Any] = [report(), payload]
    for seq, (mine, theirs) in enumerate([kinds, kinds[::-1], [payload, payload]], start=1):
        replies = [
            checked(service.handle)(Contribution("test", rank, seq, "reduce", "x", given, reduction=reduction))
            for rank, given in enumerate((mine, theirs))
        ]
        for reply in replies:
            answer = reply.wait()
            assert isinstance(answer, Reduced) or answer.error == "CollectiveMismatchError", answer


@pytest.mark.parametrize(
    "spans", [((3, 1),), ((-2, 4),), ((0, 10**9),), ((5, 6), (0, 1)), ((0, 1), (2, 3)), ((0.5, 1),)]
)
def test_ranks_that_cannot_be_are_refused(spans: Any) -> None:
    answer = Reduced(True, Ranks(spans))
    said = checked(lambda message: message)(Contribution("s", 0, 1, "reduce", "x", answer=answer, reduction="any"))
    assert isinstance(said, Failure)


@given(st.sets(st.integers(0, 40)))
def test_ranks_are_a_set_in_few_bytes(ranks: set[int]) -> None:
    kept = Ranks.of(ranks)
    assert list(kept) == sorted(ranks)
    assert len(kept) == len(ranks)
    assert all((rank in kept) == (rank in ranks) for rank in range(-2, 45))
    assert kept.can_be
    assert Ranks.of(range(1000)).spans == ((0, 999),)
