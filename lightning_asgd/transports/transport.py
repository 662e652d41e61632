"""What a transport does: carry a message to a server and its answer back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from torch.futures import Future

__all__ = ["TIMED_OUT", "NetworkDownError", "Transport"]

TIMED_OUT = "RPC ran for more than set timeout"
"""What the exception of a call says whose time is up, in the words of torch's RPC: the server may live."""


class NetworkDownError(RuntimeError):
    """A network interface went down just when this process began to serve there; only another process can."""


class Transport(ABC):
    """A worker's connection to all servers of a run."""

    @property
    @abstractmethod
    def num_servers(self) -> int:
        """Number of servers that :meth:`call` reaches, numbered from 0."""

    addresses: tuple[str, ...] = ()
    """Of the servers, where they have any."""
    alive: Any = True
    """Whether messages can be sent."""
    prepared: Collection[int] = ()
    """Servers that another process is about to take the place of."""

    @abstractmethod
    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message.

        Args:
            server: index of the server.
            message: one of :mod:`lightning_asgd.protocol`; its tensors must not change before the answer is there.
            timeout_s: seconds after which the future fails.

        Returns:
            a future of the server's answer. It fails with the transport's own exception if the server is gone.
        """

    def prepare(self, server: int, address: str) -> None:
        """Learn of another process, which is to take a lost server's place; from any thread.

        Args:
            server: index of the server.
            address: the new one's.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot reach a server in another's place")

    def call_prepared(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message to the process that :meth:`prepare` was told of; see :meth:`call`."""
        raise NotImplementedError(f"{type(self).__name__} cannot reach a server in another's place")

    def replace(self, server: int) -> None:
        """Call the process from now on that :meth:`prepare` was told of."""
        raise NotImplementedError(f"{type(self).__name__} cannot reach a server in another's place")

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. May be called more than once; from any thread."""
