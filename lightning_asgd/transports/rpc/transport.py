"""The transport over ``torch.distributed.rpc``.

A broken connection is reopened, and the calls that were lost with it are repeated over the new connection (see
:mod:`lightning_asgd.core.calls.reliable_calls`) until they time out or connections are refused, which shows that the
server's process has ended.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.futures import Future

from lightning_asgd.core.calls.reliable_calls import (
    REPLACED,
    Call,
    EncodedOnce,
    LinkedTransport,
    ReplyCache,
    ServerLink,
)
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.protocol import Contribution, codec
from lightning_asgd.transports.rpc import tensorpipe

_FORGET_S = 10.0  # for an acknowledgement, which may be lost
_LARGE = 65_536  # bytes of a buffer, on average: torch sends larger tensors without copying them
_LEAST_S = 0.001  # torch takes 0 for no limit
_REFUSALS = 2  # in a row: after one more the server counts as ended
_PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0)  # before each attempt to connect; the last one from then on


class RpcTransport(LinkedTransport["_Route"]):
    """A worker's connections to the servers. One per process at a time: a new one takes over from the old."""

    def __init__(self, addresses: Sequence[str], interface: str = "lo") -> None:
        self._agent = tensorpipe.Agent("worker", interface)
        super().__init__(addresses)

    @property
    def alive(self) -> bool:
        """Whether this process's agent still belongs to this transport."""
        return self._agent.alive

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        self._agent.stop()

    def _route_to(self, server: int, address: str) -> _Route:
        return _Route(self._agent, server, address)


class _Route:
    """The way to one server's process."""

    def __init__(self, agent: tensorpipe.Agent, server: int, address: str) -> None:
        self.address = address
        self._link = ServerLink(
            server, lambda urgent: self._connections[urgent], lambda about, message: (*about, message)
        )
        self._connections = {urgent: _Connection(agent, self._link, address, urgent=urgent) for urgent in (False, True)}

    def call(self, message: Any, timeout_s: float) -> Future[Any]:
        """See :meth:`Transport.call`."""
        call = self._link.prepare(message, timeout_s)
        self._link.post(call)
        return call.future

    def drop(self) -> None:
        """See :meth:`Route.drop`."""
        self._link.fail_all(REPLACED)


class _Connection:
    """One connection: a name that TensorPipe connects to with the first message, and a new name after it breaks."""

    # The agent's threads call back here. They take no lock that is held while the agent, which waits for them, stops.

    def __init__(self, agent: tensorpipe.Agent, link: ServerLink, address: str, *, urgent: bool) -> None:
        self.urgent = urgent
        self._agent, self._link, self._address = agent, link, address
        self._lock = threading.Lock()
        self._outages = self._refusals = 0  # in a row
        self._served: str | None = None  # the name over which a reply has arrived
        self._name = self._connect()  # None while the connection is broken

    def send(self, call: Call) -> None:
        """See :class:`LinkConnection`."""
        name = self._name
        if not self._agent.alive:
            self._link.failed(call.number, RuntimeError("the connection is closed"))
        elif name is None:
            return  # sent once there is a connection
        elif name == self._served or tensorpipe.reachable(self._address):
            self._send(name, call)
        else:
            self._broke(name, tensorpipe.ConnectionBrokenError("the network is unreachable"))

    def acknowledge(self, arrived: list[int]) -> None:
        """Make no connection: if this process ended meanwhile, TensorPipe would accept no other to the server."""
        name = self._name

        def failed(error: Exception) -> None:
            self._link.acknowledgements.note(*arrived)
            kind = tensorpipe.typed(error)
            if isinstance(kind, tensorpipe.ConnectionBrokenError) and name is not None:
                self._broke(name, kind)

        if name is None or name != self._served:
            self._link.acknowledgements.note(*arrived)
            return
        try:
            sent = self._agent.send(name, _forget, (self._link.caller, arrived), _FORGET_S)
        except RuntimeError as error:
            failed(error)
        else:
            sent.add_done_callback(lambda done: _unless_done(done, failed))

    def _send(self, name: str, call: Call) -> None:
        remaining_s = max(_LEAST_S, self._link.remaining_s(call)) if call.timeout_s else tensorpipe.INFINITE_S
        try:
            attempt = self._agent.send(name, _answer, call.packet, remaining_s)
        except RuntimeError as error:
            self._failed(name, call.number, error)
        except Exception as error:  # it cannot be pickled
            self._link.failed(call.number, error)
            raise
        else:
            attempt.add_done_callback(lambda done: self._done(name, call.number, done))

    def _done(self, name: str, number: int, attempt: Future[Any]) -> None:
        try:
            answer = attempt.value()
            answer = answer.value() if isinstance(answer, _EncodedReply) else answer
        except RuntimeError as error:
            self._failed(name, number, error)
            return
        if name == self._name:
            self._served, self._outages, self._refusals = name, 0, 0
        self._link.answered(self, number, answer)

    def _failed(self, name: str, number: int, error: RuntimeError) -> None:
        kind = tensorpipe.typed(error)
        if isinstance(kind, tensorpipe.ConnectionBrokenError) and self._agent.alive:
            self._broke(name, kind)
        else:
            self._link.failed(number, kind)

    def _broke(self, name: str, error: tensorpipe.ConnectionBrokenError) -> None:
        """Schedule a new connection, unless the server has ended; calls sent over this one wait for it."""
        with self._lock:
            if self._name != name:  # another call has noticed already
                return
            self._name = None
        self._refusals = self._refusals + 1 if error.refused else 0
        if self._refusals > _REFUSALS:
            self._outages = self._refusals = 0
            self._name = name  # the next call tries again
            self._link.connection_refused(self, str(error))
            return
        pause_s = _PAUSES_S[min(self._outages, len(_PAUSES_S) - 1)]
        self._outages += 1
        timer = threading.Timer(pause_s, self._reconnect, (str(error),))  # not in the reply thread
        timer.name, timer.daemon = "lightning_asgd.repeat", True
        timer.start()

    def _reconnect(self, why: str) -> None:
        self._link.expire(f", without a connection: {why}")
        name = self._connect()
        if name is None:
            self._link.connection_refused(self, "the connection is closed")
        else:
            self._name = name
            self._link.reconnected(self, why)

    def _connect(self) -> str | None:
        return self._agent.add_peer(f"server{self._link.server}{'-urgent' * self.urgent}", self._address)


def _unless_done(future: Future[Any], failed: Callable[[Exception], None]) -> None:
    try:
        future.value()
    except RuntimeError as error:
        failed(error)


# ---------------------------------------------------------------------- the server's side


@dataclass(frozen=True)
class _EncodedReply:
    """A reply to a collective: torch would pickle it for each worker, and only copies these bytes."""

    header: bytes
    sizes: list[int]  # of the buffers
    data: bytes  # of all buffers

    def value(self) -> Any:
        """The reply."""
        ends = list(itertools.accumulate(self.sizes, initial=0))
        return codec.decode(self.header, [bytearray(self.data[a:b]) for a, b in itertools.pairwise(ends)])


def _encoded(reply: Any) -> tuple[Any, int]:
    try:
        header, buffers = codec.encode(reply)
    except ProtocolError:  # a kind of tensor that only pickle knows
        return reply, sys.maxsize  # of an unknown size
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    if sum(sizes) > _LARGE * len(sizes):  # torch does better
        return reply, sum(sizes)
    return _EncodedReply(header, sizes, b"".join(buffers)), len(header) + sum(sizes)


class RpcServer:
    """Answers messages in this process until it is closed. The handler is called from several threads."""

    def __init__(self, handler: Callable[[Any], Any], name: str, interface: str = "lo") -> None:
        global _server
        self.handler = handler
        self.replies = ReplyCache()
        self.encoded = EncodedOnce(_encoded)
        _server = self  # before a worker can connect
        self._agent = tensorpipe.Agent(name, interface, listens=True)
        self._sockets = tensorpipe.listening_sockets()
        self.address = self._agent.address

    def accepts(self) -> bool:
        """Whether workers can connect. True while too many files are open to find out."""
        try:
            return tensorpipe.listening_sockets() >= self._sockets
        except OSError:
            return True

    def answers(self) -> bool:
        """Whether messages are answered: TensorPipe's threads do not end."""
        return _server is self

    def close(self) -> None:
        """Stop answering. May be called more than once."""
        global _server
        _server = None
        self._agent.stop()


_server: RpcServer | None = None  # this process's: TensorPipe calls functions, not methods


@tensorpipe.asynchronous
def _answer(caller: str, number: int, arrived: list[int], message: Any) -> Future[Any]:
    """Run on the server for every message."""
    server = _server
    if server is None:  # it ends, and so does the connection: torch would print an error
        return Future()
    answer = server.replies.answer(caller, number, arrived, lambda: server.handler(message))
    if isinstance(message, Contribution):
        return answer.then(lambda done: server.encoded(done.value()))
    return answer


def _forget(caller: str, arrived: list[int]) -> None:
    """Run on the server when a worker acknowledges a large reply."""
    if _server is not None:
        _server.replies.forget(caller, arrived)
