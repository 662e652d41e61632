"""What every transport must do, however it carries messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Contribution, Exchange, Failure, InitShard, Join, Joined, Leave, Reply
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection, done_within
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from tests.helpers.cluster import layout_of_floats, prepare, run_workers
from tests.helpers.script import bits
from tests.transport.conftest import Link

WAIT_S = 20.0


def answer(future: Future[Any]) -> Any:
    assert done_within(future, WAIT_S)
    return future.wait()


def ask(link: Link, server: int, message: Any) -> Any:
    return answer(link.transport.call(server, message, WAIT_S))


def filled(link: Link, weights: Sequence[torch.Tensor], workers: int = 1, scale: str = "sum") -> None:
    layout = layout_of_floats(sum(w.numel() for w in weights), len(weights))
    prepare(link.transport, link.session, layout, weights, workers=workers, scale=scale)


def push(link: Link, seq: int, update: torch.Tensor, worker: int = 0) -> Exchange:
    return Exchange(link.session, worker, seq, 0, True, True, (update,))


def fetch(link: Link, worker: int = 0) -> Exchange:
    return Exchange(link.session, worker, 0, 0, False, True)


def test_there_are_two_servers(link: Link) -> None:
    assert link.transport.num_servers == 2


def test_joining_is_answered_by_each_server(link: Link, kind: str) -> None:
    answers = [ask(link, s, Join(link.session, 0, 1)) for s in range(2)]
    assert all(isinstance(a, Joined) for a in answers)
    pids = {a.pid for a in answers}
    assert pids == {os.getpid()} if kind == "inprocess" else len(pids - {os.getpid()}) == 2


def test_an_exchange_by_value_goes_to_each_server_and_back(link: Link) -> None:
    filled(link, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    for s, expected in enumerate(([2.0, 4.0], [5.0, 7.0])):
        reply = ask(link, s, push(link, 1, torch.tensor([1.0, 2.0]) + s))
        assert isinstance(reply, Reply)
        assert (reply.version, reply.staleness, reply.verdict) == (1, 0, Verdict.APPLIED)
        assert reply.weights is not None
        assert reply.weights[0].tolist() == expected
        assert ask(link, s, fetch(link)).weights[0].tolist() == expected


def test_an_answer_is_the_askers_own(link: Link) -> None:
    filled(link, [torch.zeros(2), torch.zeros(2)])
    ask(link, 0, fetch(link)).weights[0].fill_(9.0)
    assert ask(link, 0, fetch(link)).weights[0].tolist() == [0.0, 0.0]


def test_a_message_is_the_servers_own(link: Link) -> None:
    filled(link, [torch.zeros(2), torch.zeros(2)])
    update = torch.ones(2)
    ask(link, 0, push(link, 1, update))
    update.fill_(9.0)
    assert ask(link, 0, fetch(link)).weights[0].tolist() == [1.0, 1.0]


@pytest.mark.skipif(shared_memory.create([]) is None, reason="this system has no shared memory")
def test_an_exchange_through_shared_memory(link: Link) -> None:
    filled(link, [torch.zeros(3), torch.zeros(3)])
    groups = layout_of_floats(6, 2).shard(1)
    block = shared_memory.create(groups)
    assert block is not None
    assert ask(link, 1, InitShard(link.session, 0, groups, ASGD("sum"), shared=block.ref)) is True
    for seq in (1, 2):
        block.tensors[0].fill_(5.0)
        reply = ask(link, 1, Exchange(link.session, 0, seq, 0, True, True, shared=True))
        assert (reply.version, reply.verdict, reply.weights) == (seq, Verdict.APPLIED, None)
        assert block.tensors[0].tolist() == [5.0 * seq] * 3
    assert ask(link, 1, Leave(link.session, 0)) is True
    block.close()


def test_a_reference_to_nowhere_is_answered_with_no(link: Link) -> None:
    filled(link, [torch.zeros(3), torch.zeros(3)])
    groups = layout_of_floats(6, 2).shard(0)
    block = shared_memory.create(groups)
    if block is not None:
        block.close()
        assert ask(link, 0, InitShard(link.session, 0, groups, ASGD("sum"), shared=block.ref)) is False


def test_an_error_comes_as_a_failure_and_is_raised_by_the_client(link: Link) -> None:
    failure = ask(link, 0, fetch(link))
    assert isinstance(failure, Failure)
    assert failure.error == "ProtocolError"
    shards = ShardClient(SessionClient(Connection(link.transport, link.session, 0, 1, timeout_s=WAIT_S)))
    message = Exchange(*shards.connection.sender, 0, 0, False, True)
    with pytest.raises(ProtocolError, match="Expected a join first"):
        shards.replies(shards.exchange(message, [0, 0], [None, None]))


def test_four_megabytes_arrive_bit_by_bit(link: Link) -> None:
    # Any bits at all, so NaNs with a payload, subnormals and negative zeros among them.
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator, dtype=torch.int64).to(torch.int32)
    weights = weights.view(torch.float32)
    filled(link, [weights, weights.flip(0)])
    for s, expected in enumerate((weights, weights.flip(0))):
        assert bits(ask(link, s, fetch(link)).weights[0]) == bits(expected)


def test_every_dtype_arrives(link: Link) -> None:
    dtypes = ["float64", "float16", "bfloat16", "complex64", "int64", "uint8", "bool"]
    layout = layout_of_floats(2, 2)
    role = layout.groups[0].role
    groups = tuple((role, name, 3) for name in dtypes)
    weights = tuple(torch.tensor([0, 1, 1]).to(getattr(torch, name)) for name in dtypes)
    ask(link, 0, Join(link.session, 0, 1))
    ask(link, 0, InitShard(link.session, 0, groups, ASGD("sum"), weights))
    got = ask(link, 0, fetch(link)).weights
    assert [(t.dtype, t.tolist()) for t in got] == [(t.dtype, t.tolist()) for t in weights]


def test_whole_numbers_from_four_workers_sum_up_exactly_with_repetitions(link: Link) -> None:
    n, rounds = 1000, 6
    filled(link, [torch.zeros(n), torch.zeros(n)], workers=4)

    def updates(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [torch.randint(-1000, 1000, (n,), generator=generator).float() for _ in range(rounds)]

    def work(rank: int) -> list[Verdict]:
        seen = []
        mine = updates(rank)
        for seq in range(1, rounds + 1):
            earlier = max(1, seq - 1)
            for number in (seq, seq, earlier):
                futures = [link.transport.call(s, push(link, number, mine[number - 1], rank), WAIT_S) for s in (0, 1)]
                seen += [answer(f).verdict for f in futures]
        return seen

    verdicts = [v for seen in run_workers(4, work) for v in seen]
    assert verdicts.count(Verdict.APPLIED) == 4 * rounds * 2
    assert verdicts.count(Verdict.REPEATED) == 4 * rounds * 2 * 2
    total = torch.stack([u for rank in range(4) for u in updates(rank)]).sum(0)
    for s in range(2):
        reply = ask(link, s, fetch(link))
        assert reply.version == 4 * rounds
        assert torch.equal(reply.weights[0], total)


@dataclass
class Mine:
    rank: int


def test_workers_meet(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a class of a script is: servers cannot import it.
    monkeypatch.setitem(sys.modules, "only_here", SimpleNamespace(Mine=Mine))
    monkeypatch.setattr(Mine, "__module__", "only_here")

    def work(rank: int) -> Any:
        client = SessionClient(Connection(link.transport, link.session, rank, 3, timeout_s=WAIT_S))
        client.join()
        collectives = Collectives(client, WAIT_S)
        gathered = collectives.all_gather(torch.full((rank + 1,), float(rank)))
        sums = collectives.reduce(torch.tensor([1, rank]), "sum")
        word = collectives.broadcast({"from": rank, "by": Mine(rank)}, source=2)
        collectives.barrier("end")
        return [t.tolist() for t in gathered], sums.tolist(), word

    expected = [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]], [3, 3], {"from": 2, "by": Mine(2)}
    assert run_workers(3, work) == [expected] * 3


class Unreadable:
    """Travels to a worker that cannot open it."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_object_that_cannot_be_read_is_an_error(link: Link) -> None:
    client = SessionClient(Connection(link.transport, link.session, 0, 1, timeout_s=WAIT_S))
    client.join()
    collectives = Collectives(client, WAIT_S)
    with pytest.raises(ProtocolError, match=r"An object of worker 0 could not be read: ValueError.*invalid literal"):
        collectives.contribute("broadcast", "x", Unreadable())
    assert collectives.contribute("barrier", "y") == {0: None}


def test_what_a_worker_does_to_a_collectives_result_is_its_own_affair(link: Link) -> None:
    for rank in range(2):
        ask(link, 0, Join(link.session, rank, 2))
    futures = [
        link.transport.call(0, Contribution(link.session, rank, 1, "all_gather", "x", torch.zeros(2)), WAIT_S)
        for rank in range(2)
    ]
    first, second = (answer(f) for f in futures)
    first[0].fill_(9.0)
    assert second[0].tolist() == [0.0, 0.0]


def test_a_reduction_is_the_same_for_all_and_each_may_change_its_own(link: Link) -> None:
    clients = [SessionClient(Connection(link.transport, link.session, rank, 3, timeout_s=WAIT_S)) for rank in range(3)]
    for client in clients:
        client.join()

    def work(rank: int) -> Any:
        collectives = Collectives(clients[rank], WAIT_S)
        result = collectives.reduce(torch.tensor([rank, 10.0]), "sum")
        before = result.tolist()
        result.fill_(rank)
        return before, result.tolist(), collectives.decide(rank == 1, all=False), collectives.decide(rank == 1)

    expected = [([3.0, 30.0], [float(rank)] * 2, True, False) for rank in range(3)]
    assert run_workers(3, work) == expected


def test_many_may_wait_while_others_are_served(link: Link) -> None:
    workers = 20  # more than a server has threads
    filled(link, [torch.zeros(2), torch.zeros(2)], workers=workers)
    waiting = [
        link.transport.call(0, Contribution(link.session, rank, 1, "barrier", "x"), WAIT_S)
        for rank in range(workers - 1)
    ]
    assert ask(link, 0, push(link, 1, torch.ones(2), workers - 1)).weights[0].tolist() == [1.0, 1.0]
    assert not any(f.done() for f in waiting)
    last = link.transport.call(0, Contribution(link.session, workers - 1, 1, "barrier", "x"), WAIT_S)
    for future in (*waiting, last):
        assert answer(future) == dict.fromkeys(range(workers))


def test_another_session_ends_the_one_before(link: Link) -> None:
    ask(link, 0, Join(link.session, 0, 2))
    waiting = link.transport.call(0, Contribution(link.session, 0, 1, "barrier", "x"), WAIT_S)
    ask(link, 0, Join(f"{link.session}, the next", 0, 1))
    failure = answer(waiting)
    assert isinstance(failure, Failure)
    assert failure.error == "ProtocolError"  # whichever of the two came first
