"""What a transport does: carry a message to a server and its answer back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch.futures import Future

__all__ = ["Transport"]


class Transport(ABC):
    """A worker's connection to all servers of a run."""

    @property
    @abstractmethod
    def num_servers(self) -> int:
        """Number of servers that :meth:`call` reaches, numbered from 0."""

    @abstractmethod
    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Send a message.

        Args:
            server: index of the server.
            message: one of :mod:`lightning_asgd.messages`; its tensors must not change before the answer is there.
            timeout_s: seconds after which the future fails.

        Returns:
            a future of the server's answer. It fails with the transport's own exception if the server is gone.
        """

    def replace(self, server: int, address: str) -> None:
        """Call another process from now on, which has taken a lost server's place.

        Args:
            server: index of the server.
            address: the new one's.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot reach a server in another's place")

    @abstractmethod
    def close(self) -> None:
        """Drop the connection. May be called more than once; from any thread."""
