"""A server's answer to a worker that measures its link."""

from __future__ import annotations

from typing import Any

from lightning_asgd.compression.messages import LinkProbed
from lightning_asgd.core.calls.shared_memory import host_identity
from lightning_asgd.core.server.feature import ServerFeature


class LinkProbes(ServerFeature):
    """Says whether this server can map the worker's memory, and sends bytes back."""

    def handle(self, message: Any) -> LinkProbed:
        """See :class:`ServerFeature`."""
        self._server.current(message.session)
        return LinkProbed(host_identity(), message.payload if message.echo else None)
