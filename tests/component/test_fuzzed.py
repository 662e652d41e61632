"""Messages of a broken worker, which knows the secret: of each something was changed at random."""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import random
import tracemalloc
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.futures import Future

from lightning_asgd.algorithms import ASGD, Barrier
from lightning_asgd.compression.messages import LinkProbe
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.leases.totals import WorkerLeases
from lightning_asgd.core.protocol import (
    BOOTSTRAPPED,
    FIRST_ORDER,
    Attach,
    Contribution,
    Epoch,
    Exchange,
    Failure,
    Heartbeat,
    InitShard,
    Join,
    LeaseHoldings,
    LeaseRequest,
    Leave,
    OpenEpoch,
    Policy,
    Reply,
    Request,
    RunMetadata,
    ShardState,
    WorkerMetrics,
    codec,
    forget_old_orders,
)
from lightning_asgd.core.protocol.field_types import checked
from lightning_asgd.core.server.service import Service
from lightning_asgd.elastic.messages import StatusRequest
from lightning_asgd.layerwise.messages import LayerGradient
from lightning_asgd.recovery.messages import ReplayDone, ReplicaState, StateReport
from lightning_asgd.sampling.messages import Samples

GROUPS = ((Role.PARAMETER, "float32", 2),)
EPOCH = Epoch("s/0", 1000, (500, 1000), b"")
VALUES: list[Any] = [
    *(None, -1, 0, 1, 10**30, 0.5, float("nan"), float("inf"), "", "x" * 100, b"y", [], (), {}, True, [[1]] * 9),
    *((torch.ones(2),), (torch.ones(3),), (torch.full((2,), float("nan")),), torch.ones(2), ASGD(), GROUPS, EPOCH),
]


def every_message() -> list[Request]:
    about = ("s", 1)
    return [
        Heartbeat(*about, 0, WorkerMetrics()),
        Exchange(*about, 10**6, 0, True, True, (torch.ones(2),), epoch="s/0", units=4),
        Exchange(*about, 0, 0, False, True),
        InitShard(*about, GROUPS, ASGD("sum")),
        Contribution(*about, 1, "barrier", "x", None),
        OpenEpoch(*about, EPOCH),
        LeaseRequest(*about, "s/0", 0, 0, 0, 0.1, size=4),
        RunMetadata(*about, "entry", b"x"),
        ReplayDone(*about),
        StateReport(*about, (), 0),
        Samples(*about),
        ShardState(*about),
        LinkProbe(*about, torch.ones(2), echo=True),
        Leave(*about, "it is broken"),
        Join(*about, 2, Policy(10.0), again=True),
    ]


def changed(message: Request, chance: random.Random) -> Any:
    """The message with one or two other fields, as a server decodes it; None if it does not."""
    fields = [field.name for field in dataclasses.fields(message) if field.name not in ("process", "world_size")]
    changes = {name: chance.choice(VALUES) for name in chance.sample(fields, chance.randint(1, min(2, len(fields))))}
    if isinstance(message, Join):
        changes.pop("session", None)  # whoever knows the secret may begin another session
    elif chance.random() < 0.2:
        changes["worker"] = chance.choice([2, 7, -1, 10**9])  # there is none
    try:
        header, buffers = codec.encode(dataclasses.replace(message, **changes))
        return codec.decode(header, [bytearray(buffer) for buffer in buffers])
    except ProtocolError:
        return None


@pytest.mark.parametrize("member", [True, False], ids=["a worker", "another process"])
def test_a_broken_worker_gets_errors_and_spoils_nothing(member: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    chance, now, unclear = random.Random(1), [0.0], set()
    service = Service(lambda: now[0])
    handle = checked(service.handle)
    two = {0: "here/1/aa", 1: "there/2/bb"}

    def say(message: Any, process: str) -> Any:
        return handle(dataclasses.replace(message, process=process))

    def push(number: int) -> None:
        update = torch.ones(2)
        answer = say(Exchange("s", 0, number, 0, True, True, (update,), epoch="s/0", units=0), two[0])
        assert not isinstance(answer, Failure | Future), answer

    for rank, process in two.items():
        say(Join("s", rank, 2, Policy(0.0)), process)
        say(InitShard("s", rank, GROUPS, ASGD("sum"), (torch.zeros(2),) if rank == 0 else None), process)
        say(OpenEpoch("s", rank, EPOCH), process)
    session = service.session
    assert session is not None
    broken = two[1] if member else "elsewhere/7/cc"
    applied, pushed = 0, 0
    messages = every_message()
    for number in range(3000):
        message = changed(chance.choice(messages), chance)
        if message is not None and not isinstance(message, StatusRequest):
            before = session.shards[0].counts.applied
            answer = say(message, broken)
            mine = member and not isinstance(answer, Failure) and message.worker == 1
            assert mine or session.shards[0].counts.applied == before, message
            applied += session.shards[0].counts.applied - before
            if isinstance(answer, Failure) and "This is a bug" in answer.message:
                unclear.add((type(message).__name__, answer.message.partition(":")[2][:80]))
        if number % 10 == 0:
            pushed += 1
            push(pushed)
            service.tick()
    assert service.session is session
    assert applied == 0 or member
    assert session.shards[0].latest_push[0] == pushed
    assert session.shards[0].counts.applied == pushed + applied
    weights = session.shards[0].weights
    assert weights is not None
    if not member:
        assert weights[0].tolist() == [float(pushed)] * 2
    assert not unclear, "\n".join(f"{kind}: {text}" for kind, text in sorted(unclear))


MALFORMED = [
    Epoch("s/1", 10, (10,), step=0),
    Epoch("s/1", 10, (10,), step=-4),
    Epoch("s/1", 10, ()),
    Epoch("s/1", 10, (4, 9)),
    Epoch("s/1", 10, (6, 4, 10)),
    Epoch("s/1", 10, (0, 10)),
    Epoch("s/1", 10, (10, 10)),
    Epoch("s/1", -10, (-10,)),
    Epoch("s/1", 10, (10,), done=((4, 2),)),
    Epoch("s/1", 10, (10,), done=((-1, 2),)),
    Epoch("s/1", 10, (10,), done=((5, 11),)),
    Epoch("s/1", 10, (10,), done=((5, 7), (0, 2))),
    Epoch("s/1", 10, (10,), done=((0, 5), (4, 7))),
    Epoch("s", 10, (10,)),
    Epoch("s/one", 10, (10,)),
    Epoch("s/1", 10, cast(Any, ("10",))),
]


@pytest.mark.parametrize("epoch", MALFORMED, ids=str)
@pytest.mark.parametrize("way", ["opens", "requests", "reports"])
def test_a_malformed_epoch_is_refused_and_the_others_train_on(epoch: Epoch, way: str) -> None:
    service = Service(lambda: 0.0)
    handle = checked(service.handle)
    for rank in (0, 1):
        handle(Join("s", rank, 2))
        handle(OpenEpoch("s", rank, EPOCH))
    key, mine = EPOCH.key, handle(LeaseRequest("s", 0, EPOCH.key, 0, 0, 0, 0.1, size=4))
    about = ("s", 1)
    answer = handle(
        {
            "opens": OpenEpoch(*about, epoch),
            "requests": LeaseRequest(*about, epoch.key, 0, 0, 0, 0.1, opens=epoch),
            "reports": StateReport(*about, (), part=LeaseHoldings(epoch, (), 0, -1)),
        }[way]
    )
    assert isinstance(answer, Failure)
    assert answer.error == "ProtocolError"
    assert "A server was sent" in answer.message
    assert "broken worker" in answer.message
    theirs = handle(LeaseRequest("s", 1, key, 0, 0, 0, 0.1, size=4))
    assert [last - first for first, last in (*mine.ranges, *theirs.ranges)] == [4, 4]
    assert service.state.epochs.done == (key, ())


@pytest.mark.parametrize(
    "part", [LeaseHoldings(EPOCH, ((4, 2),), 0, 0), LeaseHoldings(EPOCH, ((0, 1001),), 0, 0)], ids=str
)
def test_a_report_of_units_that_are_none_is_refused(part: LeaseHoldings) -> None:
    answer = checked(Service(lambda: 0.0).handle)(StateReport("s", 0, (), part=part))
    assert isinstance(answer, Failure)
    assert "Expected ranges of the epoch's units" in answer.message


def test_a_worker_that_was_granted_nothing_yet_may_report() -> None:
    service = Service(lambda: 0.0)
    checked(service.handle)(Join("s", 0, 1))
    part = LeaseHoldings(EPOCH, (), 0, WorkerLeases().served)
    answer = checked(service.handle)(StateReport("s", 0, (), part=part))
    assert isinstance(answer, Failure)
    assert "disconnected while a server was restored" in answer.message


@pytest.mark.parametrize("held", [("s", ()), ("s/0", ((4, 2),)), ("s/0", ((0, 3), (2, 4)))], ids=str)
def test_weights_that_hold_units_of_no_epoch_are_refused(held: tuple[str, Any]) -> None:
    answer = checked(Service(lambda: 0.0).handle)(StateReport("s", 0, (ReplicaState(0, 1, (), {}, *held),)))
    assert isinstance(answer, Failure)
    assert "A server was sent ReplicaState(" in answer.message


PUSH = Exchange("s", 1, 1, 0, True, True, (torch.ones(2),), epoch="s/0", units=4)
REQUEST = LeaseRequest("s", 1, EPOCH.key, 0, 0, 0, 0.1)
NUMBERS: list[tuple[Request, dict[str, Any]]] = [
    *((PUSH, {"lr": lr}) for lr in (math.nan, math.inf, 1e30)),
    *((PUSH, {"speed": speed}) for speed in (math.inf, -1.0)),
    *((PUSH, {name: -1}) for name in ("seq", "steps", "units")),
    *((REQUEST, {name: -1}) for name in ("trained", "applied", "begun", "size", "unit_s", "flush")),
    *((REQUEST, {name: math.inf}) for name in ("unit_s", "rtt_s", "flush")),
    *((REQUEST, about) for about in ({"size": 0}, {"unit_s": math.nan})),
    (Contribution("s", 1, 1, "barrier", "x"), {"timeout_s": math.nan}),
    (Contribution("s", 1, 1, "barrier", "x"), {"seq": -1}),
]


@pytest.mark.parametrize(("message", "nonsense"), NUMBERS, ids=lambda each: str(each) if isinstance(each, dict) else "")
def test_a_number_that_cannot_be_is_refused_by_its_name_and_changes_nothing(
    message: Request, nonsense: dict[str, Any]
) -> None:
    service = Service(lambda: 0.0)
    handle = checked(service.handle)
    for rank in (0, 1):
        handle(Join("s", rank, 2))
        handle(InitShard("s", rank, GROUPS, ASGD(), (torch.zeros(2),) if rank == 0 else None))
        handle(OpenEpoch("s", rank, EPOCH))
    answer = handle(dataclasses.replace(message, **nonsense))
    assert isinstance(answer, Failure), answer
    ((name, value),) = nonsense.items()
    assert f"A server was sent a {type(message).__name__} whose {name} is {value}. Expected " in answer.message
    assert isinstance(handle(dataclasses.replace(PUSH, lr=0.1)), Reply)
    assert handle(dataclasses.replace(REQUEST, worker=0)).ranges


@pytest.mark.parametrize("segment", [-1, 2, 10**9])
def test_a_request_for_a_sync_interval_that_the_epoch_does_not_have_stops_none_of_the_others(segment: int) -> None:
    service = Service(lambda: 0.0)
    handle = checked(service.handle)
    for rank in (0, 1):
        handle(Join("s", rank, 2))
        handle(OpenEpoch("s", rank, EPOCH))
    broken = handle(LeaseRequest("s", 1, EPOCH.key, segment, 0, 0, 0.1, wait=True))
    assert isinstance(broken, Failure)
    assert f"asks for units after sync interval {segment} of epoch s/0" in broken.message
    grant = handle(LeaseRequest("s", 0, EPOCH.key, 0, 0, 0, 0.1, size=4))
    assert grant.ranges == ((0, 4),)


def server_of(run: str) -> tuple[Service, Callable[[Any], Any]]:
    """A server of an elastic run with one worker, or of a job with two, and its handler."""
    service = Service(lambda: 0.0, run)
    handle = checked(service.handle)
    if run:
        handle(Attach("s", "the first"))
        handle(InitShard("s", 1, GROUPS, ASGD("sum"), (torch.zeros(2),)))
        handle(RunMetadata("s", 1, BOOTSTRAPPED, True))
        return service, handle
    for rank in (0, 1):
        handle(Join("s", rank, 2))
        handle(InitShard("s", rank, GROUPS, ASGD("sum"), (torch.zeros(2),) if rank == 0 else None))
        handle(OpenEpoch("s", rank, EPOCH))
    return service, handle


GROWING: list[tuple[str, Any, str]] = [
    ("", InitShard("s", 1, GROUPS, ASGD("sum")), "fragment"),
    ("", Contribution("s", 1, 1, "barrier", "x"), "seq"),
    ("", RunMetadata("s", 1, "entry", b"x"), "name"),
    *(("", LayerGradient("s", 1, 0, 0, 0, torch.ones(2)), name) for name in ("phase", "step", "layer")),
    ("s", Heartbeat("s", 1), "worker"),
    ("s", InitShard("s", 1, GROUPS, ASGD("sum")), "fragment"),
    ("s", RunMetadata("s", 1, "entry", b"x"), "name"),
    *(("s", Attach("s", "another"), name) for name in ("about", "process")),
]


def test_a_piece_of_a_gradient_that_has_another_length_is_refused() -> None:
    _, handle = server_of("")
    waits = handle(LayerGradient("s", 0, 0, 0, 0, torch.ones(2)))
    broken = handle(LayerGradient("s", 1, 0, 0, 0, torch.ones(1)))
    assert isinstance(broken, Failure)
    assert "Worker 1 sent (1,) gradients of piece 0, worker 0 (2,)" in broken.message
    handle(LayerGradient("s", 1, 0, 0, 0, 3 * torch.ones(2)))
    assert waits.value().tolist() == [2.0, 2.0]


def numbered(message: Any, field: str, number: int) -> Any:
    """The message with a value of its own in a field."""
    value = getattr(message, field)
    return dataclasses.replace(message, **{field: f"{value} {number}" if isinstance(value, str) else value + number})


def growth(handle: Callable[[Any], Any], message: Any, field: str, first: int, number: int = 200) -> float:
    """How many bytes a server keeps of each message, on average."""
    gc.collect()
    tracemalloc.start()
    try:
        for each in range(first, first + number):
            handle(numbered(message, field, each))
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / number
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("run", "message", "field"), GROWING, ids=lambda each: str(each).partition("(")[0] or "job")
def test_what_a_broken_worker_makes_up_is_refused_in_the_end(
    run: str, message: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("pending_replies._MOST", "membership._STRANGERS"):
        monkeypatch.setattr(f"lightning_asgd.core.server.{limit}", 500)
    monkeypatch.setattr("lightning_asgd.elastic.server._MOST_SILENT", 500)
    _, handle = server_of(run)
    answers = [handle(numbered(message, field, number)) for number in range(2, 1102)]
    assert not isinstance(answers[300], Failure)
    assert isinstance(answers[-1], Failure)
    assert growth(handle, message, field, 2000) < 60


def test_a_push_that_may_wait_is_refused_before_it_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_asgd.core.server.pending_replies._MOST", 50)
    service = Service(lambda: 0.0)
    handle = checked(service.handle)
    for rank in (0, 1):
        handle(Join("s", rank, 2))
        weights = (torch.zeros(2),) if rank == 0 else None
        handle(InitShard("s", rank, GROUPS, ASGD(transforms=[Barrier()]), weights))
    push = Exchange("s", 1, 1, 0, True, True, (torch.ones(2),), may_wait=True)
    answers = [handle(dataclasses.replace(push, seq=seq)) for seq in range(1, 200)]
    refused = sum(isinstance(answer, Failure) for answer in answers)
    assert service.session is not None
    shard = service.session.shards[0]
    assert 0 < shard.latest_push[1] == len(answers) - refused == 50


def test_an_elastic_run_has_any_number_of_epochs() -> None:
    """The names of who opened them are few, on servers and on workers, who report them if a server is lost."""
    kept = {"entry": 1}
    for number in range(1200):
        kept[f"{FIRST_ORDER}s/{number}"] = number
        forget_old_orders(kept)
    assert list(kept.values()) == [1, 1196, 1197, 1198, 1199]
    service, handle = server_of("s")
    for number in range(1200):
        name = f"{FIRST_ORDER}s/{number}"
        mine = handle(RunMetadata("s", 1, name, (1, "mine"), first=True))
        assert mine == handle(RunMetadata("s", 1, name, (2, "theirs"), first=True)) == (1, "mine")
    assert len(service.state.registry.metadata) < 10
    assert not isinstance(handle(Attach("s", "another")), Failure)


@pytest.mark.parametrize("run", ["", "s"], ids=["job", "elastic"])
def test_no_other_message_makes_a_server_remember_more(run: str) -> None:
    bounded = {(type(message), field) for about, message, field in GROWING if about == run}
    grown = []
    gc.collect()
    gc.freeze()  # else each of the hundred collections below goes through what all tests before have left
    for message in [*every_message(), LayerGradient("s", 1, 0, 0, 0, torch.ones(2)), Attach("s", "another")]:
        fields = [each.name for each in dataclasses.fields(message) if type(getattr(message, each.name)) in (int, str)]
        for field in fields:
            if (type(message), field) in bounded:
                continue
            _, handle = server_of(run)
            for number in range(100):
                handle(numbered(message, field, number))
            each = growth(handle, message, field, 100)
            if each > 60:
                grown.append(f"{type(message).__name__}.{field}: {each:.0f} bytes each")
    gc.unfreeze()
    assert not grown
