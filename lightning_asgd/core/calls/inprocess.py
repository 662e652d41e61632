"""Servers in the same process: every call is answered before it returns. For tests and simulations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch.futures import Future

from lightning_asgd.core.calls.transport import Transport


class InProcessTransport(Transport):
    """Calls one handler per server, such as ``Service().handle``, with copies of the messages."""

    def __init__(self, handlers: Sequence[Callable[[Any], Any]]) -> None:
        self._handlers = list(handlers)

    @property
    def num_servers(self) -> int:
        """Number of handlers."""
        return len(self._handlers)

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """Answer at once; a future that the handler returns is returned as it is."""
        answer = self._handlers[server](copy.deepcopy(message))
        if isinstance(answer, Future):
            return answer.then(lambda done: copy.deepcopy(done.wait()))
        future: Future[Any] = Future()
        future.set_result(copy.deepcopy(answer))
        return future

    def close(self) -> None:
        """Nothing to close."""
