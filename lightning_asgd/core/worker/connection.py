"""A worker's connection to the servers: messages out, answers back, and servers' errors turned into exceptions.

A worker waits for servers only here. Where lost servers can be restored, a loss interrupts the wait: the waiting
thread takes part in the recovery, then resumes the wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.futures import Future

from lightning_asgd.core.calls.transport import CallTimeoutError, Transport
from lightning_asgd.core.foundation.errors import ASGDError, ServerLostError, error_from
from lightning_asgd.core.protocol import Failure

COORDINATOR = 0  # index of the server that coordinates
_PATIENCE_S = 3.0  # between two looks for a signal
GRACE_S = 30.0  # how much longer a worker waits for an answer that the coordinator itself limits in time


class Restorer(Protocol):
    """Restores lost servers."""

    def restore(self, servers: Collection[int]) -> None:
        """Restore these servers; called by the training thread."""

    def watch(self, server: int) -> None:
        """Have the training thread interrupted when a server is lost."""


class AnotherLost(Exception):
    """Another server was lost during a recovery: start the recovery again with all lost servers."""


class Connection:
    """One worker's connection to all servers, in one session.

    ``world_size`` is 0 in an elastic run, where the worker gets its number when it attaches. A server may
    take ``timeout_s`` for an answer that does not depend on other workers, ``patience_s`` for one that does.
    ``with_last_output`` adds to an error's text the last output of a dead server, where this process knows it.
    """

    def __init__(
        self,
        transport: Transport,
        session: str,
        worker: int,
        world_size: int,
        *,
        timeout_s: float = 300.0,
        patience_s: float = 1800.0,
        with_last_output: Callable[[str], str] = str,
    ) -> None:
        self.transport = transport
        self.session = session
        self.worker = worker
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        self._with_last_output = with_last_output
        self.restorer: Restorer | None = None  # None where lost servers cannot be restored
        self.moving: Collection[int] = ()  # servers that others, on another machine, may replace
        self.restored = [0] * transport.num_servers  # how often each was
        self.replaced = [0] * transport.num_servers  # how often another process took its place
        self._sent: WeakKeyDictionary[Future[Any], int] = WeakKeyDictionary()  # how often, when each message was sent
        self.check: Callable[[], None] = lambda: None  # raises a pending signal's exception
        self.given_up = False  # whether a signal has ended a wait
        self.gone: set[int] = set()  # lost servers whose replacements this worker has not joined
        self._lost_servers: set[int] = set()  # servers to restore
        self.being_restored: set[int] = set()  # at present
        self._interrupt: Future[None] | None = None  # ends the present wait

    @property
    def servers(self) -> range:
        """The servers' numbers."""
        return range(self.transport.num_servers)

    @property
    def sender(self) -> tuple[str, int]:
        """The session and this worker's number, the first fields of every request."""
        return self.session, self.worker

    # ------------------------------------------------------------------ messages and answers

    def post(self, server: int, message: Any, timeout_s: float | None = None) -> Future[Any]:
        """Send a message; the future is for :meth:`result`."""
        replaced = self.replaced[server]
        try:
            future = self.transport.call(server, message, self.timeout_s if timeout_s is None else timeout_s)
        except ASGDError:  # the message cannot be sent
            raise
        except RuntimeError as error:
            raise self._broken(server, replaced, error) from error
        self._sent[future] = replaced
        return future

    def result(self, server: int, future: Future[Any], seconds: float | None = None, *, attends: bool = True) -> Any:
        """Wait for a server's answer. Raises what the server reports, or a :class:`ServerLostError`.

        While it waits it restores lost servers, unless ``attends`` is false.
        """
        seconds, wait = self.timeout_s if seconds is None else seconds, self.wait if attends else done_within
        if not future.done() and not wait(future, seconds + GRACE_S):
            which = "collective_s" if seconds == self.patience_s != self.timeout_s else "exchange_s"
            raise self.lost(
                f"Server {server} did not answer worker {self.worker} within {seconds:g} s. Expected a reply. Check "
                f"the server's machine and the network, or raise timeouts.{which}."
            )
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._broken(server, self._sent.get(future, self.replaced[server]), error) from error
        if isinstance(value, Failure):
            raise error_from(value.error, value.message)
        return value

    def ask(self, server: int, message: Any) -> Any:
        """Send a message and wait for the answer; sent again to a server that was restored meanwhile."""
        while True:
            try:
                return self.result(server, self.post(server, message))
            except ServerLostError as error:
                self.recover(error)

    def ask_together(self, messages: Mapping[int, Any]) -> None:
        """Send a message to each server, and wait for answers that depend on the other workers."""
        futures = {server: self.post(server, each, self.patience_s + GRACE_S) for server, each in messages.items()}
        for server, future in futures.items():
            self.result(server, future, self.patience_s)

    def wait(self, future: Future[Any], seconds: float) -> bool:
        """Wait until a future is done; meanwhile restore lost servers, if that is possible."""
        if self.restorer is None:
            return self.wait_interruptibly(future, seconds)
        while not future.done():
            self.attend()
            if self.being_restored and self._lost_servers - self.being_restored:
                raise AnotherLost
            either = self._interrupt = Future()
            future.add_done_callback(lambda _, either=either: _set(either))  # type: ignore[misc]
            if not self._lost_servers - self.being_restored and not self.wait_interruptibly(either, seconds):
                return future.done()
        self._interrupt = None
        return True

    def wait_interruptibly(self, future: Future[Any], seconds: float) -> bool:
        """Wait. While servers are lost, a signal that would end this worker ends the wait, and shortens later ones."""
        until = time.monotonic() + (min(seconds, _PATIENCE_S) if self.given_up else seconds)
        try:
            while not done_within(future, min(_PATIENCE_S, max(until - time.monotonic(), 0.0))):
                if self._lacks_servers and threading.current_thread() is threading.main_thread():
                    self.check()
                if time.monotonic() >= until:
                    return False
        except BaseException:  # Ctrl-C, too
            if self._lacks_servers:
                self.given_up, self.restorer, self.check = True, None, lambda: None
            raise
        return True

    @property
    def _lacks_servers(self) -> bool:
        return bool(self.gone or self._lost_servers)

    # ------------------------------------------------------------------ lost servers

    def interrupt(self, server: int) -> None:
        """Have the training thread restore a server when it next waits or calls :meth:`attend`. For any thread."""
        self._lost_servers.add(server)
        interrupt = self._interrupt
        if interrupt is not None:
            _set(interrupt)

    def attend(self) -> None:
        """Restore lost servers, if there are any. Called between two batches."""
        if self._lost_servers and not self.being_restored:
            self._restore()

    @property
    def must_attend(self) -> bool:
        """Whether lost servers can be restored now."""
        return bool(self._lost_servers)

    @property
    def may_lack(self) -> list[int]:
        """Servers that are being restored, and may not have what the coordinator has answered."""
        return [] if COORDINATOR in self.being_restored else sorted(self.being_restored)

    def recover(self, error: ServerLostError) -> None:
        """Restore a server after an error, unless that is past. Raises the error if it is impossible."""
        if self.restorer is None or self.being_restored or error.server is None:
            raise error
        if self.concerns_present(error):
            self._lost_servers.add(error.server)
            self._restore()

    def concerns_present(self, error: ServerLostError) -> bool:
        """Whether the process is lost that is called now, and not one that was replaced since the message was sent."""
        return error.server is not None and error.replaced == self.replaced[error.server]

    def replace(self, server: int) -> None:
        """Call a lost server's replacement from now on."""
        self.replaced[server] += 1
        self.transport.replace(server)
        self.gone.discard(server)

    def follow(self, server: int, address: str, replaced: int) -> None:
        """Call the process in a lost server's place that another process of this island calls."""
        if self.replaced[server] != replaced:
            self.transport.prepare(server, address)
            self.replace(server)
            self.replaced[server] = replaced

    def _restore(self) -> None:
        while self._lost_servers and self.restorer is not None:
            servers = self.being_restored = set(self._lost_servers)
            try:
                self.restorer.restore(servers)
            except AnotherLost:
                continue
            finally:
                self.being_restored = set()
            self._lost_servers -= servers
            for server in servers:
                self.restored[server] += 1
                self.restorer.watch(server)

    def lost(self, text: str) -> ServerLostError:
        """The error for a server that is lost."""
        return ServerLostError(self._with_last_output(text))

    def _broken(self, server: int, replaced: int, error: Exception) -> ServerLostError:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        lost = self.lost(
            f"Server {server} is lost: worker {self.worker} got {cause!r} instead of an answer. "
            "Expected a running server. Its last output is in the main process's error or log."
        )
        if not isinstance(error, CallTimeoutError):  # else it may live, and is not replaced
            lost.server, lost.replaced = server, replaced
        return lost


_setting = threading.Lock()


def _set(future: Future[None]) -> None:
    """Complete a future that another thread may complete at the same time."""
    with _setting:
        if not future.done():
            future.set_result(None)


def done_within(future: Future[Any], seconds: float) -> bool:
    """Wait without blocking signals, so that Ctrl-C ends the wait (``Future.wait`` would not return to Python)."""
    if future.done():
        return True
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event.wait(seconds) or future.done()
