"""A wire on which messages arrive, and answers come back, when the test says so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.worker import connection


@dataclass
class Sent:
    server: int
    message: Any
    written: bytes
    future: Future[Any] = field(default_factory=Future)
    handled: bool = False
    answer: Any = None


class ScriptedTransport(Transport):
    """Not thread-safe, and meant for exchanges; until :meth:`hold` is called it answers at once.

    Args:
        handlers: one per server.
    """

    def __init__(self, handlers: Sequence[Callable[[Any], Any]]) -> None:
        self._handlers = list(handlers)
        self._held = False
        self.in_flight: list[Sent] = []
        self.log: list[Any] = []  # every message, as it was sent

    @property
    def num_servers(self) -> int:
        return len(self._handlers)

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        assert not [s for s in self.in_flight if s.server == server], "a second message before the first is answered"
        sent = Sent(server, message, pickle.dumps(message))
        self.log.append(copy.deepcopy(message))
        self.in_flight.append(sent)
        if not self._held:
            self.arrive(server)
            self.answer(server)
        return sent.future

    def close(self) -> None:
        self.in_flight.clear()

    def hold(self) -> None:
        """From now on nothing moves by itself."""
        self._held = True

    def release(self) -> None:
        """Move all that is in flight, and answer at once from now on."""
        self._held = False
        self.deliver()

    def deliver(self) -> None:
        """Let everything in flight arrive and be answered."""
        for server in range(self.num_servers):
            while self.arrive(server):
                pass
            while self.answer(server):
                pass

    def arrive(self, server: int) -> bool:
        """Let the oldest message to a server arrive.

        Returns:
            whether there was one.
        """
        sent = next((s for s in self.in_flight if s.server == server and not s.handled), None)
        if sent is None:
            return False
        assert pickle.dumps(sent.message) == sent.written, "the worker changed a message that was still being sent"
        sent.answer = copy.deepcopy(self._handlers[server](copy.deepcopy(sent.message)))
        sent.handled = True
        return True

    def answer(self, server: int) -> bool:
        """Let the oldest answer of a server come back.

        Returns:
            whether there was one.
        """
        sent = next((s for s in self.in_flight if s.server == server and s.handled), None)
        if sent is None:
            return False
        self.in_flight.remove(sent)
        sent.future.set_result(sent.answer)
        return True

    def lose(self, server: int, cause: str = "eof") -> None:
        """Fail everything in flight to a server."""
        for sent in [s for s in self.in_flight if s.server == server]:
            self.in_flight.remove(sent)
            sent.future.set_exception(RuntimeError(cause))


class Waits:
    """Counts the times a worker waits for an answer that is not there, and lets it come then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: ScriptedTransport) -> None:
        self.count = 0
        self._transport = transport
        monkeypatch.setattr(connection, "done_within", self._done_within)

    def _done_within(self, future: Future[Any], seconds: float) -> bool:
        if not future.done():
            self.count += 1
            self._transport.deliver()
        return future.done()


def bits(tensor: torch.Tensor) -> bytes:
    """To compare tensors by: NaN equals NaN, and 0 is not -0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
