"""Requests that are answered later. Knows neither network, clock nor threads.

A request is known by its object, since a worker may send equal ones. It is kept here until it is answered, so that no
other can have its number meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError, ProtocolError
from lightning_asgd.core.protocol import Failure

_MOST = 100_000  # requests of one kind that a worker can have waiting: pieces of a large model's gradient are many


class Completion(NamedTuple):
    """A reply that is due; an error fails the request."""

    request: Any
    reply: Any


def failure(error: ASGDError) -> Failure:
    """An error as it is sent to a worker."""
    return Failure(type(error).__name__, str(error))


def complete_with(future: Future[Any], answer: object) -> None:
    """Complete a future with an answer, or once that is there, if it is a future itself."""
    if isinstance(answer, Future):
        answer.add_done_callback(lambda done: future.set_result(done.value()))
    else:
        future.set_result(answer)


class PendingReplies:
    """Requests that are answered later, in the order of their arrival."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, Any, Future[Any]]] = {}  # by id of the request: its number, and its future
        # Requests of a kind, and those of one worker, by id: most messages concern only a few of very many requests.
        self._kinds: defaultdict[type, dict[int, None]] = defaultdict(dict)
        self._workers: defaultdict[tuple[type, int], dict[int, None]] = defaultdict(dict)
        self._arrived = 0
        self.full: set[tuple[type, int]] = set()  # kinds and workers of which no more requests are taken

    def __contains__(self, request: object) -> bool:
        return id(request) in self._pending

    def count(self, kind: type) -> int:
        """How many pending requests are of exactly this kind."""
        return len(self._kinds[kind])

    def of(self, *kinds: type) -> list[Any]:
        """The pending requests of these kinds."""
        ids = [each for kind, ids in self._kinds.items() if issubclass(kind, kinds) for each in ids]
        return [request for _, request, _ in sorted(map(self._pending.__getitem__, ids), key=itemgetter(0))]

    def but(self, *kinds: type) -> list[Any]:
        """The pending requests of other kinds."""
        return self.of(*(kind for kind in self._kinds if not issubclass(kind, kinds)))

    def check_room(self, request: object) -> None:
        """Raise a ``ProtocolError`` if too many requests of its kind and worker wait already."""
        if _whose(request) in self.full:
            raise ProtocolError(f"{_MOST} {type(request).__name__} messages of one worker wait. Expected fewer.")

    def add(self, request: object) -> Future[Any]:
        """Keep a request; its reply comes with the future."""
        future: Future[Any] = Future()
        self._arrived += 1
        self._pending[id(request)] = self._arrived, request, future
        self._kinds[type(request)][id(request)] = None
        of_worker = self._workers[whose := _whose(request)]
        of_worker[id(request)] = None
        if len(of_worker) >= _MOST:
            self.full.add(whose)
        return future

    def take(self, request: object) -> Future[Any]:
        """Remove a request; the caller replies to it."""
        *_, future = self._pending.pop(id(request))
        del self._kinds[type(request)][id(request)]
        of_worker = self._workers[_whose(request)]
        self.full.discard(_whose(request))
        del of_worker[id(request)]
        if not of_worker:
            del self._workers[_whose(request)]
        return future

    def complete_all(self, kind: type, reply: Any, workers: Collection[int] | None = None) -> None:
        """Reply to all requests of a kind, or to those of some workers."""
        if workers is None:
            requests = self.of(kind)
        else:
            ids = [each for worker in workers for each in self._workers.get((kind, worker), ())]
            requests = [self._pending[each][1] for each in ids]
        self.complete_each(requests, reply)

    def complete_each(self, requests: Iterable[Any], reply: Any) -> None:
        """Reply to some requests; see :meth:`complete`."""
        for request in requests:
            self.complete(request, reply)

    def complete(self, request: object, reply: Any) -> None:
        """Reply to a request, unless it was answered before; an error fails it."""
        if request in self:
            self.take(request).set_result(failure(reply) if isinstance(reply, ASGDError) else reply)


def _whose(request: object) -> tuple[type, int]:
    return type(request), getattr(request, "worker", -1)
