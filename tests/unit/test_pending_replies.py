from __future__ import annotations

from lightning_asgd.core.foundation.errors import WorkerLostError
from lightning_asgd.core.protocol import DisconnectWatch, Failure, LeaseRequest
from lightning_asgd.core.server.pending_replies import PendingReplies


def request() -> LeaseRequest:
    return LeaseRequest("s", 0, "0", 0, 0, 0, 0.0)


def test_equal_requests_are_told_apart() -> None:
    pending, first, second = PendingReplies(), request(), request()
    futures = [pending.add(each) for each in (first, second)]
    assert first == second
    pending.complete(second, "reply")
    assert [future.done() for future in futures] == [False, True]
    assert first in pending
    assert second not in pending


def test_a_request_is_answered_once() -> None:
    pending, message = PendingReplies(), request()
    future = pending.add(message)
    pending.complete(message, 1)
    pending.complete(message, 2)
    assert future.value() == 1


def test_an_error_fails_a_request() -> None:
    pending, message = PendingReplies(), request()
    future = pending.add(message)
    pending.complete(message, WorkerLostError("it died"))
    assert future.value() == Failure("WorkerLostError", "it died")


def test_requests_are_listed_by_kind_in_the_order_of_their_arrival() -> None:
    pending, messages = PendingReplies(), [request(), DisconnectWatch("s", 0), request()]
    for message in messages:
        pending.add(message)
    first, last = pending.of(LeaseRequest)
    assert first is messages[0]
    assert last is messages[2]
    assert len(pending.of(object)) == 3


def test_whoever_takes_a_request_answers_it() -> None:
    pending, message = PendingReplies(), request()
    future = pending.add(message)
    assert pending.take(message) is future
    assert message not in pending
