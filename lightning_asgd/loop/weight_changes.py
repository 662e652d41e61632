"""Whether a module's weights change otherwise than by the steps that are counted."""

from __future__ import annotations

import logging

from torch.nn import Module

__all__ = ["WeightChanges"]

log = logging.getLogger(__name__)


class WeightChanges:
    """How often a module's weights were changed in place, when this was noted last."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self.note()

    def note(self) -> None:
        """What has changed until now was expected."""
        self._noted = self._counted()

    def check(self, worker: int, *, moved: bool) -> None:
        """Warn if the weights have changed, and no step that was counted has ``moved`` them."""
        if not moved and self._counted() != self._noted:
            log.warning(
                "Worker %d's weights have changed since the latest sync point, but none of the optimizers that it "
                "exchanges for has taken a step. Such changes are not exchanged as they happen. Expected the module to "
                "be trained by the optimizers that were given together with it.",
                worker,
            )

    def _counted(self) -> int:
        # Those of inference tensors, which nothing can train, are not counted.
        counted = (each for each in self._module.parameters() if not each.is_inference())
        return sum(parameter._version for parameter in counted)
