"""What ``serve`` replies to health checks: whether each of its servers answers a message now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning_asgd.core.calls.transport import CallTimeoutError, Transport, answer_within
from lightning_asgd.core.foundation.environment import joined
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.elastic.health import HealthResponder
from lightning_asgd.elastic.messages import Status, StatusRequest

_ANSWER_S = 2.0  # for all servers; a health check waits longer
_GRACE_S = 1.0  # so that a late answer is reported as such, whatever the transport says of it
_FRESH_S = 1.0  # for which a report is given again


class ServersHealth(AbstractContextManager["ServersHealth"]):
    """Asks the servers when it is asked itself, over a connection like a worker's, and replies.

    ``keys``, of the servers in the rendezvous, are empty until the servers have started.
    """

    def __init__(self, run_id: str, rendezvous: Rendezvous, transport: str, interface: str) -> None:
        self.keys: Sequence[str] = ()
        host, port = rendezvous.address
        self._name = f"Run {run_id!r} at {joined(host, port)}"
        self._rendezvous, self._kind, self._interface = rendezvous, registry.kind_of(transport), interface
        self._connection: Transport | None = None
        self._latest, self._until = (False, ""), 0.0
        self._responder = HealthResponder(host, port, self.report)

    def __exit__(self, *_: object) -> None:
        self._responder.close()
        if self._connection is not None:
            self._connection.close()

    def report(self) -> tuple[bool, str]:
        """Whether all servers answer, and a sentence."""
        if time.monotonic() > self._until:
            try:
                self._latest = True, f"{self._name}: {self._ask()}"
            except Exception as error:  # whatever it is, an engine needs a reply
                self._latest = False, f"{self._name}: {error}"
            self._until = time.monotonic() + _FRESH_S
        return self._latest

    def _ask(self) -> str:
        if not self.keys:
            raise RuntimeError("its servers are starting.")
        connection, until = self._connected(), time.monotonic() + _ANSWER_S
        calls = [connection.call(index, StatusRequest(), _ANSWER_S + _GRACE_S) for index in range(len(self.keys))]
        answers = [self._answer(index, call, until) for index, call in enumerate(calls)]
        first, number = answers[0], len(answers)
        epoch = "no epoch has begun" if first.epoch is None else f"epoch {first.epoch}"
        servers = "1 server answers" if number == 1 else f"{number} servers answer"
        present = sum(not worker.away for worker in first.workers)
        workers = "1 worker" if present == 1 else f"{present} workers"
        return f"{servers}, {workers}, {epoch}, version {first.version}."

    def _connected(self) -> Transport:
        """A connection to the present servers."""
        addresses = []
        for index, key in enumerate(self.keys):
            address = self._rendezvous.peek_server(key).get("address")
            if address is None:
                raise RuntimeError(f"server {index} is starting, or being replaced.")
            addresses.append(str(address))
        connection = self._connection
        if connection is None or not connection.alive or connection.addresses != tuple(addresses):
            if connection is not None:
                connection.close()
            self._connection = connection = self._kind.connect(addresses, self._interface)
        return connection

    def _answer(self, index: int, call: Any, until: float) -> Status:
        try:
            answer = answer_within(call, max(until - time.monotonic(), 0))
        except CallTimeoutError:
            raise RuntimeError(f"server {index} does not answer within {_ANSWER_S:g} s.") from None
        except RuntimeError as error:
            raise RuntimeError(f"server {index} does not answer: {error}.") from error
        if not isinstance(answer, Status):
            raise RuntimeError(f"server {index} answered {answer}.")
        return answer
