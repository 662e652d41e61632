"""Means of gradients, layer by layer: a sum that waits for every worker. No network, no clock, no threads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.server.feature import Server, ServerFeature
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.layerwise.messages import LayerGradient

Key = tuple[int, int, int]


@dataclass
class Means:
    """Gradients that wait for those of other workers.

    Workers number the phases between sync points, the steps of a phase and the layers. A worker at a sync point is not
    waited for in the phase that it has ended.
    """

    living: Collection[int] = ()
    _resting: dict[int, int] = field(default_factory=dict)  # worker -> the phase it has ended
    _waiting: dict[Key, dict[int, tuple[LayerGradient, Tensor]]] = field(default_factory=dict)

    def update_members(self, living: Collection[int]) -> list[Completion]:
        """Note which workers take part now."""
        self.living = living
        return self._due(list(self._waiting))

    def add(self, message: LayerGradient) -> list[Completion]:
        """Take a worker's gradient, whose tensor is given away by the caller; without one, the worker ends the phase.

        Every worker of a layer gets its mean gradient, the same tensor; as under DDP not finite if one part is not.
        """
        if message.gradient is None:
            self._resting[message.worker] = message.phase
            return [Completion(message, None), *self._due(list(self._waiting))]
        key = (message.phase, message.step, message.layer)
        waiting = self._waiting.setdefault(key, {})
        for worker, (_, other) in waiting.items():
            if other.shape != message.gradient.shape:
                raise ProtocolError(
                    f"Worker {message.worker} sent {tuple(message.gradient.shape)} gradients of piece {message.layer}, "
                    f"worker {worker} {tuple(other.shape)}. Expected the same model on every worker."
                )
        waiting[message.worker] = (message, message.gradient)
        return self._due([key])

    def _due(self, keys: list[Key]) -> list[Completion]:
        due: list[Completion] = []
        for key in keys:
            needed = {w for w in self.living if self._resting.get(w, -1) < key[0]}
            if not needed <= set(self._waiting[key]):
                continue
            parts = [part for _, part in sorted(self._waiting.pop(key).items())]
            # Divided first, as DDP does, so that the bits are the same.
            mean = parts[0][1] / len(parts)
            for _, gradient in parts[1:]:
                mean += gradient / len(parts)
            due += [Completion(message, mean) for message, _ in parts]
        return due


class LayerMeans(ServerFeature):
    """The means of a session."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._means = Means()

    def handle(self, message: Any) -> Any:
        """See :class:`ServerFeature`."""
        self._means.living = self._server.member(message).members.living
        return self._server.complete(self._means.add(message), message)

    def members_changed(self) -> list[Completion]:
        """See :class:`ServerFeature`."""
        session = self._server.state.session
        return [] if session is None else self._means.update_members(session.members.living)
