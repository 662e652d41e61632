"""Calls that come twice are handled once, and answered as often as they come."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.futures import Future

from lightning_asgd.core.calls.reliable_calls import Acknowledgements, EncodedOnce, ReplyCache
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Ranks, Reduced, Reply
from lightning_asgd.transports.rpc.transport import _encoded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_repeated_call_is_not_handled_again() -> None:
    once, handled = ReplyCache(), itertools.count(1)
    answers = [once.answer("a", 1, [], lambda: next(handled)).wait() for _ in range(3)]
    assert answers == [1, 1, 1]
    assert once.answer("b", 1, [], lambda: next(handled)).wait() == 2  # somebody else's
    assert once.answer("a", 2, [], lambda: next(handled)).wait() == 3


@pytest.mark.parametrize("kind", ["plain", "coded"])
def test_only_a_large_answer_is_worth_a_message_that_it_has_arrived(kind: str) -> None:
    def bulky(floats: int) -> bool:
        parts = torch.empty(floats), torch.empty(0)
        return Reply(1, 0, Verdict.APPLIED, weights=parts if kind == "plain" else (parts, parts[1])).bulky

    assert not Reply(1, 0, Verdict.APPLIED).bulky  # it lies in shared memory
    assert not bulky(1 << 20)
    assert bulky((1 << 20) + 1)


def test_a_call_that_waits_is_answered_to_all_that_ask() -> None:
    once, later = ReplyCache(), Future()
    both = [once.answer("a", 1, [], lambda: later) for _ in range(2)]
    assert not any(f.done() for f in both)
    later.set_result("answer")
    assert [f.wait() for f in both] == ["answer"] * 2


def test_calls_that_are_over_take_no_memory() -> None:
    once, blocked = ReplyCache(), Future[int]()
    once.answer("a", 1, [], lambda: blocked)
    for number in range(2, 1000):
        once.answer("a", number, [number - 1] if number > 2 else [], lambda: 0)
    tracemalloc.start()
    for number in range(1000, 6000):
        once.answer("a", number, [number - 1], lambda: 0)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 20_000, f"{grown} bytes for 5,000 calls"
    handled: list[int] = []
    for number in (2, 1500, 5998):  # copies that come late
        assert once.answer("a", number, [], lambda: handled.append(1)).wait() is None
    assert not handled
    once.answer("a", 6000, [], lambda: handled.append(2))
    assert handled == [2]


def test_of_calls_that_are_over_with_gaps_the_latest_are_remembered() -> None:
    once, handled, calls = ReplyCache(), list[int](), 20_000
    for number in range(1, calls):
        once.answer("a", number, [], lambda: 0)
        once.forget("a", [number] if number % 2 else [])
    for number in (calls - 1, calls - 101):
        once.answer("a", number, [], lambda: handled.append(1))
    assert not handled


def test_an_error_is_an_answer_too() -> None:
    once = ReplyCache()

    def fail() -> None:
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            once.answer("a", 1, [], fail).wait()
    later: Future[None] = Future()
    answer = once.answer("a", 2, [], lambda: later)
    later.set_exception(RuntimeError("not now"))
    with pytest.raises(RuntimeError, match="not now"):
        answer.wait()


def test_what_has_arrived_is_kept_no_longer_nor_what_nobody_asks_for() -> None:
    clock, handled = Clock(), itertools.count(1)
    once = ReplyCache(clock)
    first = once.answer("a", 1, [], lambda: next(handled))
    once.answer("a", 2, [], lambda: next(handled))
    once.answer("a", 3, [1], lambda: next(handled))
    assert 1 not in once._callers["a"].calls
    assert once.answer("a", 1, [], lambda: next(handled)).wait() is None, "a copy that comes late is not handled"
    once.forget("a", [2])
    assert list(once._callers["a"].calls) == [3]
    clock.now = 500.0
    assert once.answer("a", 3, [], lambda: next(handled)).wait() == 3
    waiting: Future[None] = Future()
    once.answer("c", 1, [], lambda: waiting)
    clock.now = 2000.0
    once.forget("b", [])
    assert [*once._silent, *once._callers] == ["c", "b"], "who waits for an answer is not forgotten"
    assert once.answer("a", 3, [], lambda: next(handled)).wait() == 4
    clock.now = 9000.0
    assert once.answer("a", 3, [], lambda: next(handled)).wait() == 4, "who comes back after a long time is known"
    assert first.wait() == 1


def test_answers_that_nobody_takes_do_not_pile_up() -> None:
    once, waiting = ReplyCache(), Future()
    first = once.answer("a", 0, [], lambda: waiting)
    for number in range(1, 20_000):
        once.answer("a", number, [], lambda: None)
    assert len(once._callers["a"].calls) <= 1024
    assert once.answer("a", 0, [], lambda: None) is first  # what is not answered yet is not forgotten


def test_a_caller_that_is_silent_is_found_behind_one_that_waits() -> None:
    clock = Clock()
    once = ReplyCache(clock)
    once.answer("waits", 1, [], Future)
    once.forget("silent", [])
    clock.now = 700.0
    once.forget("talks", [])
    assert [*once._silent, *once._callers] == ["waits", "talks"]


def test_weights_for_a_caller_that_is_silent_are_not_kept_and_a_call_that_is_repeated_is_handled_again() -> None:
    clock, handled = Clock(), list[str]()
    once = ReplyCache(clock)

    def handle(reply: Any) -> Any:
        handled.append("again")
        return reply

    weights = Reply(1, 0, Verdict.APPLIED, (torch.zeros(3),))
    replies = {1: weights, 2: Reply(1, 0, Verdict.APPLIED), 3: Future()}
    for number, reply in replies.items():
        once.answer("killed", number, [], lambda reply=reply: handle(reply))
    clock.now = 59.0
    once.forget("talks", [])
    assert sorted(once._callers["killed"].calls) == [1, 2, 3]
    clock.now = 61.0
    once.forget("talks", [])
    assert sorted(once._silent["killed"].calls) == [2, 3]
    assert once.answer("killed", 1, [], lambda: handle(weights)).wait() is weights  # it was only suspended
    assert len(handled) == 4
    assert list(once._callers) == ["talks", "killed"]


def test_the_reply_to_a_collective_is_encoded_once_and_any_other_as_often_as_it_is_sent() -> None:
    seen: list[Any] = []

    def encode(reply: Any) -> tuple[str, int]:
        seen.append(reply)
        return f"encoded {len(seen)}", 10

    once, gathered, reduced = EncodedOnce(encode), {0: "a"}, Reduced(True, Ranks(((0, 2),)))
    assert [once(gathered) for _ in range(3)] == ["encoded 1"] * 3
    assert once(dict(gathered)) == "encoded 2"  # another one, though equal: its tensors may be others
    assert [once(reduced) for _ in range(2)] == ["encoded 3"] * 2
    assert [once(None) for _ in range(2)] == ["encoded 4", "encoded 5"]
    assert once(reduced) == "encoded 3"  # another reply came in between


def test_an_encoded_reply_that_takes_much_memory_is_not_kept() -> None:
    seen: list[Any] = []

    def encode(reply: Any) -> tuple[int, int]:
        seen.append(reply)
        return len(seen), 100 << 20

    once, gathered = EncodedOnce(encode), {0: "a"}
    assert [once(gathered) for _ in range(2)] == [1, 2]


def test_rpc_says_how_large_a_reply_is_that_torch_encodes() -> None:
    def reply(tensor: torch.Tensor) -> Reduced:
        return Reduced([tensor], Ranks(((0, 1),)))

    large, unknown = reply(torch.zeros(1 << 16)), reply(torch.eye(2).to_sparse())
    assert _encoded(large) == (large, 4 << 16)
    sent, nbytes = _encoded(unknown)
    assert sent is unknown
    once = EncodedOnce(lambda each: (each, nbytes))
    once(unknown)
    assert once._latest == (None, None), "of an unknown size: not kept"


def test_arrivals_are_told_once() -> None:
    arrivals = Acknowledgements()
    arrivals.note(1, 2)
    arrivals.note(3)
    assert arrivals.take() == [1, 2, 3]
    assert arrivals.take() == []


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), max_size=40))
def test_in_any_order(calls: list[tuple[str, int]]) -> None:
    once, handled = ReplyCache(), []
    for caller, number in calls:
        answer = once.answer(caller, number, [], lambda c=caller, n=number: handled.append((c, n)) or (c, n))  # type: ignore[misc,func-returns-value]
        assert answer.wait() == (caller, number)
    assert sorted(handled) == sorted(set(calls))
