"""Calls that come twice are handled once, and answered as often as they come."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.futures import Future

from lightning_asgd.protocol import Reply
from lightning_asgd.stats import Verdict
from lightning_asgd.transports.reliable_calls import Acknowledgements, ReplyCache


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
    assert list(once._callers) == ["c", "b"], "who waits for an answer is not forgotten"
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
