"""The samples of the posterior that a server has kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_asgd.core.server.feature import ServerFeature


class PosteriorSamples(ServerFeature):
    """Answers with the samples of the first shard, by version."""

    def handle(self, message: Any) -> list[tuple[int, tuple[Tensor, ...]]]:
        """See :class:`ServerFeature`."""
        shards = self._server.current(message.session).shards
        return list(shards[0].samples) if 0 in shards else []
