"""A worker's end of reliable calls, over connections that a script breaks: no network, no threads, no waiting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.futures import Future

from lightning_asgd.core.calls.reliable_calls import Call, ReplyCache, ServerLink
from lightning_asgd.core.calls.transport import CallTimeoutError


@dataclass
class Message:
    text: str
    urgent: bool = False


@dataclass
class Answer:
    text: str
    bulky: ClassVar[bool] = True


class Wire:
    """A connection and its far end: packets wait on it until the script delivers them, and are lost when it breaks."""

    def __init__(self, end: End, urgent: bool) -> None:
        self.end, self.urgent, self.up = end, urgent, True
        self.packets: list[Any] = []  # (number, packet), on their way to the server
        self.answers: list[tuple[int, Any]] = []  # on their way back

    def send(self, call: Call) -> None:
        if self.up:
            self.packets.append(call.packet)

    def acknowledge(self, arrived: list[int]) -> None:
        if self.up:
            self.packets.append(("acknowledge", arrived))
        else:
            self.end.link.acknowledgements.note(*arrived)

    def deliver(self, index: int = 0) -> None:
        packet = self.packets.pop(index)
        if packet[0] == "acknowledge":
            self.end.cache.forget("me", packet[1])
            return
        _, number, arrived, message = packet
        answer = self.end.cache.answer("me", number, arrived, lambda: self.end.handle(message))
        answer.add_done_callback(lambda done: self.answers.append((number, done.value())))

    def bring(self, index: int = 0) -> None:
        self.end.link.answered(self, *self.answers.pop(index))

    def breaks(self) -> None:
        self.up = False
        self.packets.clear()
        self.answers.clear()

    def renew(self) -> None:
        self.up = True
        self.end.link.reconnected(self, "the script broke it")


class End:
    """A link, its two connections, and the server that answers there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.wires = {urgent: Wire(self, urgent) for urgent in (False, True)}
        self.link = ServerLink(3, self.wires.__getitem__, self.pack, lambda: self.now)
        self.cache = ReplyCache(lambda: self.now)
        self.handled: Counter[str] = Counter()

    def pack(self, about: list[Any], message: Message) -> tuple[Any, ...]:
        if message.text == "cannot be packed":
            raise ValueError(message.text)
        return (*about, message)

    def handle(self, message: Message) -> Answer:
        self.handled[message.text] += 1
        return Answer(message.text)

    def call(self, text: str, timeout_s: float = 0.0, *, urgent: bool = False) -> Future[Any]:
        call = self.link.prepare(Message(text, urgent), timeout_s)
        self.link.post(call)
        return call.future


def outcome(future: Future[Any]) -> Any:
    """The answer, or the text of the error."""
    assert future.done()
    try:
        return future.value()
    except RuntimeError as error:
        return str(error)


def test_a_call_is_answered_and_its_answer_acknowledged_at_once_where_it_is_large() -> None:
    end = End()
    wire, future = end.wires[False], end.call("a")
    wire.deliver()
    wire.bring()
    assert future.value() == Answer("a")
    assert wire.packets == [("acknowledge", [1])]
    assert end.link.acknowledgements.take() == []


def test_a_small_answer_is_acknowledged_with_the_next_call() -> None:
    end = End()
    wire = end.wires[False]
    end.call("a")
    wire.packets.clear()
    end.link.answered(wire, 1, "small")
    assert wire.packets == []
    end.call("b")
    assert wire.packets[0][1:3] == (2, [1])


def test_what_is_urgent_has_a_connection_of_its_own() -> None:
    end = End()
    end.call("weights")
    end.call("heartbeat", urgent=True)
    assert [len(end.wires[urgent].packets) for urgent in (False, True)] == [1, 1]
    end.wires[True].breaks()
    end.wires[True].renew()
    assert [len(end.wires[urgent].packets) for urgent in (False, True)] == [1, 1], "weights were repeated for nothing"


@pytest.mark.parametrize("lost", ["the call", "its answer"])
def test_what_a_broken_connection_took_with_it_is_repeated_and_handled_once(
    lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    end = End()
    wire, future = end.wires[False], end.call("a")
    if lost == "its answer":
        wire.deliver()
    wire.breaks()
    later = end.call("b")  # meanwhile
    wire.renew()
    for _ in range(2):
        wire.deliver()
        wire.bring()
    assert (future.value(), later.value()) == (Answer("a"), Answer("b"))
    assert end.handled == {"a": 1, "b": 1}
    assert caplog.messages == ["The connection to server 3 broke (the script broke it) and was reopened."]


def test_an_answer_that_comes_twice_counts_once() -> None:
    end = End()
    wire, future = end.wires[False], end.call("a")
    wire.packets *= 2
    wire.deliver()
    wire.deliver()
    wire.bring()
    wire.bring()
    assert future.value() == Answer("a")
    assert wire.packets == [("acknowledge", [1])]


def test_an_acknowledgement_that_cannot_be_sent_goes_with_the_next_call() -> None:
    end = End()
    wire = end.wires[False]
    end.call("a")
    wire.deliver()
    wire.up = False
    wire.bring()
    wire.renew()
    end.call("b")
    assert wire.packets[-1][1:3] == (2, [1])


def test_a_call_whose_time_is_up_fails_and_gives_back_what_it_acknowledged() -> None:
    end = End()
    end.link.acknowledgements.note(7)
    future, forever = end.call("a", 5.0), end.call("b")
    end.now = 5.0
    end.link.expire()
    assert not future.done()
    end.now = 5.1
    end.link.expire(", without a connection: why")
    with pytest.raises(CallTimeoutError, match=r"^no answer within 5 s, without a connection: why$"):
        future.value()
    assert end.link.acknowledgements.take() == [7]
    end.wires[False].deliver()
    end.wires[False].bring()  # too late
    end.now = 1e9
    end.link.expire()
    assert not forever.done(), "a time-out of 0 is none"


def test_what_cannot_be_packed_is_raised_and_its_acknowledgements_are_kept() -> None:
    end = End()
    end.link.acknowledgements.note(7)
    with pytest.raises(ValueError, match="cannot be packed"):
        end.call("cannot be packed")
    assert end.link.acknowledgements.take() == [7]


def test_a_connection_that_is_refused_fails_its_own_calls_and_may_be_tried_again() -> None:
    end = End()
    weights, sign = end.call("weights"), end.call("heartbeat", urgent=True)
    end.link.connection_refused(end.wires[False], "no process listens")
    assert outcome(weights) == "no process listens"
    assert not sign.done()
    again = end.call("again")
    end.wires[False].deliver(1)
    end.wires[False].bring()
    assert again.value() == Answer("again")


def test_without_a_server_all_calls_fail_from_then_on() -> None:
    end = End()
    before = [end.call("weights"), end.call("heartbeat", urgent=True)]
    end.link.fail_all("the server has ended")
    end.link.fail_all("a later reason")
    assert {outcome(future) for future in (*before, end.call("after"))} == {"the server has ended"}
    assert not end.link.is_pending(1)


class Storm(RuleBasedStateMachine):
    """Anything may happen at any time: a call is handled once at most, and answered with its own answer."""

    def __init__(self) -> None:
        super().__init__()
        self.end = End()
        self.calls: dict[str, Future[Any]] = {}

    @rule(urgent=st.booleans(), timeout_s=st.sampled_from([0.0, 3.0]))
    def call(self, urgent: bool, timeout_s: float) -> None:
        text = f"{len(self.calls)}"
        self.calls[text] = self.end.call(text, timeout_s, urgent=urgent)

    @rule(urgent=st.booleans(), which=st.integers(0, 5), twice=st.booleans())
    def deliver(self, urgent: bool, which: int, twice: bool) -> None:
        wire = self.end.wires[urgent]
        if wire.packets:
            index = which % len(wire.packets)
            if twice:
                wire.packets.append(wire.packets[index])
            wire.deliver(index)

    @rule(urgent=st.booleans(), which=st.integers(0, 5))
    def bring(self, urgent: bool, which: int) -> None:
        wire = self.end.wires[urgent]
        if wire.answers:
            wire.bring(which % len(wire.answers))

    @rule(urgent=st.booleans())
    def breaks(self, urgent: bool) -> None:
        self.end.wires[urgent].breaks()

    @rule(urgent=st.booleans())
    def renew(self, urgent: bool) -> None:
        self.end.wires[urgent].renew()

    @rule(seconds=st.sampled_from([1.0, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.end.now += seconds
        self.end.link.expire()

    @precondition(lambda self: len(self.calls) > 3)
    @rule()
    def calm(self) -> None:
        """All connections stand, and everything arrives: then nothing waits, and the server keeps nothing."""
        wires = self.end.wires.values()
        for wire in wires:
            wire.renew()
        while any(wire.packets or wire.answers for wire in wires):
            for wire in wires:
                while wire.packets:
                    wire.deliver()
                while wire.answers:
                    wire.bring()
        for text, future in self.calls.items():
            assert future.done(), f"call {text} waits for ever"

    @invariant()
    def each_is_handled_once_and_has_its_own_answer(self) -> None:
        assert not [text for text, times in self.end.handled.items() if times > 1]
        for text, future in self.calls.items():
            if future.done():
                assert outcome(future) in (Answer(text), "no answer within 3 s")


TestStorm = Storm.TestCase
TestStorm.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
