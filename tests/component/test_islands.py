"""A server's view of an island: an exchange takes place once all parts have arrived, as a whole or not at all."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd import Advanced
from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.layout import Groups, Role
from lightning_asgd.core.foundation.process_name import this_process
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Exchange, Failure, InitShard, Join, Leave, Reply
from lightning_asgd.core.protocol.field_types import checked
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.setup import Start
from lightning_asgd.core.worker.synchronizer import Training, run
from lightning_asgd.islands.group import peer_has_ended
from lightning_asgd.islands.messages import ExchangePart, InitPart, Part
from lightning_asgd.islands.part_exchange import PartSender
from lightning_asgd.islands.synchronizer import IslandSynchronizer, set_up_island
from tests.helpers.actor_islands import ActorGroup, Talk
from tests.helpers.cluster import Cluster

GROUPS: Groups = ((Role.PARAMETER, "float32", 10), (Role.PARAMETER, "float64", 2))
RANGES = ((((0, 3), (8, 10)), ((0, 2),)), (((3, 8),), ()))  # per process, of each group
FIRST = torch.arange(10.0)
OTHERS = torch.tensor([4.0, 5.0], dtype=torch.float64)


def split(values: tuple[torch.Tensor, ...], process: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.cat([whole[:0], *(whole[a:b] for a, b in ranges)])
        for whole, ranges in zip(values, RANGES[process], strict=True)
    )


class Island:
    """Two processes, as worker 0 of a job of two."""

    def __init__(self, worker: int = 0) -> None:
        self.service = Service(lambda: 0.0)
        self.about = "s", worker
        for each in (0, 1):
            assert not isinstance(self.service.handle(Join("s", each, 2)), Failure)
        for process in (0, 1):
            weights = split((FIRST, OTHERS), process)
            self.ask(InitPart(*self.about, Part(process, 2, RANGES[process]), weights))
        self.ask(InitShard(*self.about, GROUPS, ASGD("sum"), in_parts=True))
        self.ask(InitShard("s", 1 - worker, GROUPS, ASGD("sum")))

    def ask(self, message: Any) -> Any:
        answer = self.service.handle(message)
        assert not isinstance(answer, Failure), answer
        return answer

    def messages(self, number: int, update: torch.Tensor | None, seq: int = 1) -> list[Any]:
        """The exchange, and its parts."""
        push = update is not None
        lead = Exchange(*self.about, seq, 0, push, True, island=number, steps=1)
        values = (update, torch.tensor([number, 9.0], dtype=torch.float64)) if update is not None else None
        parts = [
            ExchangePart(*self.about, process, number, None if values is None else split(values, process))
            for process in (0, 1)
        ]
        return [lead, *parts]

    def weights(self) -> torch.Tensor:
        """As a worker of one process fetches them."""
        reply = self.ask(Exchange("s", 1, 0, 0, False, True))
        return reply.weights[0].clone()


def value(answer: Any) -> Any:
    return answer.value() if isinstance(answer, Future) else answer


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_exchange_takes_place_when_everything_has_arrived(order: tuple[int, ...]) -> None:
    island = Island()
    assert torch.equal(island.weights(), FIRST)
    update = torch.linspace(-1, 1, 10)
    messages = island.messages(1, update)
    answers: dict[int, Any] = {}
    for place, index in enumerate(order):
        assert torch.equal(island.weights(), FIRST), place
        answers[index] = island.ask(messages[index])
        assert isinstance(answers[index], Future) == (place < 2)
    new = FIRST + update
    assert torch.equal(island.weights(), new)
    reply, *parts = (value(answers[index]) for index in range(3))
    assert isinstance(reply, Reply)
    assert (reply.version, reply.verdict, reply.weights) == (1, Verdict.APPLIED, None)
    for process, part in enumerate(parts):
        for got, expected in zip(
            part, split((new, torch.tensor([5.0, 14.0], dtype=torch.float64)), process), strict=True
        ):
            assert torch.equal(got, expected)


def test_weights_alone_are_fetched_in_parts_too() -> None:
    island = Island()
    answers = [island.ask(message) for message in island.messages(1, None, seq=0)]
    assert value(answers[0]).verdict is Verdict.NONE
    assert [value(each)[0].tolist() for each in answers[1:]] == [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]


def test_an_update_with_a_nan_in_one_part_is_refused_as_a_whole() -> None:
    island = Island()
    update = torch.ones(10)
    update[4] = float("nan")  # of the second process
    answers = [island.ask(message) for message in island.messages(1, update)]
    assert value(answers[0]).verdict is Verdict.REFUSED
    assert torch.equal(island.weights(), FIRST)
    assert value(answers[1])[0].tolist() == [0, 1, 2, 8, 9]


def test_a_part_of_an_exchange_that_was_given_up_does_not_join_another_one() -> None:
    island = Island()
    _, first, _ = island.messages(1, torch.full((10,), 100.0))
    given_up = island.ask(first)  # the other process has died before it sent its own; the island begins again
    lead, mine, other = island.messages(2, torch.ones(10))
    assert isinstance(island.ask(lead), Future)
    assert isinstance(island.ask(other), Future)
    assert torch.equal(island.weights(), FIRST)
    island.ask(mine)
    assert torch.equal(island.weights(), FIRST + 1)
    assert value(given_up).error == "WorkerAwayError"  # else it would be kept for ever


def test_what_waits_for_more_of_an_exchange_fails_once_the_island_has_left() -> None:
    island = Island()
    lead, mine, _ = island.messages(1, torch.ones(10))
    waiting = [island.ask(lead), island.ask(mine)]
    island.ask(Leave("s", 0, "its process has ended", process=this_process()))
    assert [each.value().error for each in waiting] == ["WorkerAwayError"] * 2
    assert torch.equal(island.weights(), FIRST)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"part": 2}, r"part 2, which it has not described. Expected one of \[0, 1\]"),
        ({"update": None}, r"sent tensors of \(dtype, scalars\) \[\]. Expected"),
        ({"update": (torch.zeros(4), torch.zeros(0, dtype=torch.float64))}, r"float32, 4\).*Expected"),
    ],
)
def test_a_wrong_part_fails_the_exchange_for_all_of_its_processes(change: dict[str, Any], text: str) -> None:
    island = Island()
    lead, mine, other = island.messages(1, torch.ones(10))
    waiting = [island.ask(lead), island.ask(mine)]
    failed = value(island.service.handle(replace(other, **change)))
    assert isinstance(failed, Failure)
    assert [each.value() for each in waiting] == [failed] * 2
    assert re.search(text, failed.message)
    assert torch.equal(island.weights(), FIRST)


def test_parts_that_are_not_all_of_a_shard_are_refused() -> None:
    island = Island()
    gap = Part(1, 2, (((3, 7),), ()))
    island.ask(InitPart(*island.about, gap))
    lead, mine, other = island.messages(1, torch.ones(10))
    island.ask(lead)
    island.ask(mine)
    short = replace(other, update=(torch.ones(4), torch.zeros(0, dtype=torch.float64)))
    failed = value(island.service.handle(short))
    assert "exchange 9 scalars of group 0, which has 10" in failed.message


@pytest.mark.parametrize(
    ("part", "weights", "text"),
    [
        (Part(0, 1, (((0, 10),),)), None, "described parts of [1] groups. Expected the 2 groups"),
        (Part(0, 1, (((0, 10),), ((0, 2),), ())), None, "described parts of [3] groups. Expected the 2 groups"),
        (Part(0, 1, (((0, 10),), ((0, 2),))), (torch.zeros(3), torch.zeros(2)), "brought [3, 2] scalars per group"),
        (Part(0, 9999, (((0, 10),), ((0, 2),))), None, ""),
    ],
)
def test_parts_of_another_form_are_refused_and_nothing_waits_for_them(part: Part, weights: Any, text: str) -> None:
    island = Island()
    about = "s", 1
    described = checked(island.service.handle)(InitPart(*about, part, weights))
    if isinstance(described, Failure):
        assert text in described.message
        return
    island.ask(InitShard(*about, GROUPS, ASGD("sum")))
    lead = island.service.handle(Exchange(*about, 1, 0, True, True, island=1))
    values = torch.ones(10), torch.ones(2, dtype=torch.float64)
    failed = value(island.service.handle(ExchangePart(*about, 0, 1, values)))
    assert text in failed.message
    assert value(lead) == failed


def test_a_tensor_of_another_shape_is_refused() -> None:
    island = Island()
    lead, mine, other = island.messages(1, torch.ones(10))
    waiting = [island.ask(lead), island.ask(mine)]
    assert other.update is not None
    failed = value(island.service.handle(replace(other, update=(other.update[0].view(1, 5), other.update[1]))))
    assert [each.value() for each in waiting] == [failed] * 2


class OneProcess:
    """The group of an island of one process: orders are obeyed at once."""

    rank, size, leads = 0, 1, True
    others_have_theirs = True  # if there were others

    def __init__(self) -> None:
        self.shares = 0
        self.known: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.orders: dict[str, Any] = {}
        self.on, self.report = self.orders.__setitem__, self.facts.__setitem__

    def order(self, name: str, *arguments: Any) -> None:
        self.orders[name](*arguments)

    def order_later(self, name: str, *arguments: Any) -> None:
        pass

    def share(self, call: Any) -> Any:
        self.shares += 1
        result = call()
        self.known = {name: fact() for name, fact in self.facts.items()}
        return result

    def expect_same_steps(self, steps: int) -> None:
        pass

    def gather(self, mine: Any) -> list[Any]:
        return [mine]

    def differing(self, tensors: Any) -> dict[str, list[int]]:
        return {}

    def all(self, decision: bool) -> bool:
        return decision and self.others_have_theirs

    def agree(self, error: Any) -> Any:
        return error


def enter(cluster: Cluster, group: OneProcess, **settings: Any) -> tuple[torch.nn.Module, IslandSynchronizer]:
    """Worker 0 of a job of two, as an island; its module has zeros for weights."""
    module = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        module.weight.zero_()
    client, other = cluster.client(0), cluster.client(1)
    client.join()
    other.join()
    config = ExchangeConfig.create(algorithm=ASGD("sum"), **settings)
    sender = PartSender(client.connection, this_process())
    start = Start(fill=True)
    return module, set_up_island(group, module, sender, client, config, Training(), start)  # type: ignore[arg-type]


def step(module: torch.nn.Module, island: IslandSynchronizer) -> None:
    with torch.no_grad():
        module.weight.add_(1.0)
    island.count_step()


def test_a_push_that_one_server_rejects_is_sent_there_again_with_its_parts() -> None:
    cluster = Cluster(servers=2, workers=2)
    module, island = enter(cluster, OneProcess(), nsync=1, advanced=Advanced(overlap=False))
    sessions = [service.session for service in cluster.services]
    assert sessions[1] is not None
    sessions[1].members.fenced.add(0)  # server 0 has heard of it, and takes the push
    step(module, island)
    run(island.flush())
    for session in sessions:
        assert session is not None
        assert session.shards[0].weights[0].tolist() == [1.0] * 3
        assert session.shards[0].counts.applied == 1


def test_an_answer_is_merged_once_every_process_has_its_part_and_looks_are_few() -> None:
    group = OneProcess()
    module, island = enter(Cluster(workers=2), group, nsync=4)
    looks: list[int] = []
    for number in range(1, 9):
        group.others_have_theirs = number > 6
        step(module, island)
        before = group.shares
        run(island.advance())
        looks += [number] * (group.shares - before)
        assert island.stats.exchanges == (number > 6), number
    # It began after step 4. The answer was there at once, and on all processes after step 7: the next one is due at 8.
    assert looks == [4, 5, 6, 7, 8]
    assert island.stats.steps == 8


def test_the_state_on_the_servers_is_restored_in_a_call_of_all_processes() -> None:
    group = OneProcess()
    _, island = enter(Cluster(workers=2), group, nsync=1)
    state, before = island.state(), group.shares
    island.restore(state)
    assert group.shares == before + 1


def test_the_others_learn_of_any_error_of_a_process_and_do_not_wait_for_it() -> None:
    class Unpicklable(Exception):
        """It is local."""

    def fail() -> None:
        raise Unpicklable("no memory")

    group = OneProcess()
    _, island = enter(Cluster(workers=2), group, nsync=1)
    alone = ActorGroup(Talk(1, lambda _: None), 0)
    group.agree = alone.agree  # type: ignore[method-assign]
    with pytest.raises(Unpicklable, match="no memory"):
        island._parts[0]._together(fail)
    assert len(alone._talk.met) == 2  # whether any has failed, and how
    assert str(alone.agree(Unpicklable("no memory"))) == "Unpicklable on process 0 of the island: no memory"


def test_an_island_that_has_described_no_parts_is_refused() -> None:
    island = Island()
    failed = island.service.handle(Exchange("s", 1, 1, 0, True, True, island=1))
    assert "have not said which parts they exchange" in failed.message


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),  # of a program's own connection
    ],
)
def test_only_gloo_tells_that_another_process_has_ended(error: Exception, ended: bool) -> None:
    assert peer_has_ended(error) is ended
