"""What a transport does: carry a message to a server and the reply back."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from torch.futures import Future


class CallTimeoutError(RuntimeError):
    """The time of a call is up. The server may be alive."""


class NetworkDownError(RuntimeError):
    """The network interface went down while this process started to serve on it. Only a new process can serve."""


class Transport(ABC):
    """A worker's connection to all servers of a job or an elastic run."""

    @property
    @abstractmethod
    def num_servers(self) -> int:
        """Number of servers that :meth:`call` reaches, numbered from 0."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the servers, where they have any."""
        return ()

    @property
    def alive(self) -> bool:
        """Whether messages can be sent."""
        return True

    @property
    def prepared(self) -> Collection[int]:
        """Servers that :meth:`prepare` named a replacement for, and :meth:`replace` did not."""
        return ()

    @abstractmethod
    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message, whose tensors must not change before it is answered.

        The future fails with a ``RuntimeError`` when the server is gone, and with a :class:`CallTimeoutError` after
        ``timeout_s`` seconds; 0 for never.
        """

    def prepare(self, server: int, address: str) -> None:
        """Set the address of a lost server's replacement; from any thread."""
        raise NotImplementedError(f"{type(self).__name__} cannot reach a replacement")

    def call_prepared(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message to the process that :meth:`prepare` named; see :meth:`call`."""
        raise NotImplementedError(f"{type(self).__name__} cannot reach a replacement")

    def replace(self, server: int) -> None:
        """From now on send calls to the process that :meth:`prepare` named."""
        raise NotImplementedError(f"{type(self).__name__} cannot reach a replacement")

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. May be called more than once; from any thread."""


def answer_within(future: Future[Any], timeout_s: float) -> Any:
    """The reply to a call. Raises its error, or a :class:`CallTimeoutError`. Ctrl-C ends the wait."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(timeout_s):
        raise CallTimeoutError(f"no answer within {timeout_s:g} s")
    return future.wait()
