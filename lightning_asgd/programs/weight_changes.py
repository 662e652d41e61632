"""Whether a module's weights change otherwise than by the steps that are counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module

from lightning_asgd.core.algorithms.base import Payload
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.worker.feature import Fit, WorkerFeature
from lightning_asgd.core.worker.synchronizer import Synchronizer

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
        return _changes_of(self._module.parameters())


class ChangesBetweenBatches(WorkerFeature):
    """Whether a program changes weights between two batches: no other worker learns of that."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._module = fit.trainer.lightning_module
        self._layout: Layout | None = None  # that `_watched` was made for
        self._watched: list[Tensor] = []
        self._noted: list[int] = []
        self._steps = -1
        self._watches = not fit.membership.alone and fit.config.algorithm.payload not in (Payload.LAYERS, Payload.NONE)

    def batch_done(self) -> None:
        """A batch has ended."""
        if not self._watches:
            return
        synchronizer = self._fit.synchronizer
        if synchronizer.layout is not self._layout:
            self._layout = synchronizer.layout
            self._watched = _trained(self._module, synchronizer.layout)
        self._steps, self._noted = synchronizer.stats.steps, self._versions()

    def rejoin(self) -> None:
        """Changes until the next batch ends are expected."""
        self._steps = -1

    def between_batches(self) -> None:
        """Warn once if weights have changed since the last batch ended, and no step was taken."""
        if not self._watches or self._steps != self._fit.synchronizer.stats.steps:
            return
        now = self._versions()
        if now == self._noted:
            return
        self._watches = False
        changed = next(p for p, a, b in zip(self._watched, self._noted, now, strict=True) if a != b)
        log.warning(
            "Weights such as %r were changed between two batches on worker %d, and are pushed as if a step had made "
            "the change: the servers mix it with the updates of other workers. So weights that are loaded or "
            "initialised here do not become those of all, and a bound that they are clamped to may not hold once they "
            "are merged. Set weights at a sync point, such as on_train_epoch_end or on_validation_end, and clamp them "
            "at the beginning of training_step, too.",
            next((name for name, p in self._module.named_parameters() if p is changed), "?"),
            self._fit.membership.rank,
        )

    def _versions(self) -> list[int]:
        return [0 if parameter.is_inference() else parameter._version for parameter in self._watched]


class UnseenSteps(WorkerFeature):
    """Counts the step of a batch whose optimizer no hook counts, such as one inside another optimizer.

    If a step of the batch was counted, none is added: the next push holds all changes since the latest one. Changes
    between two batches, such as clamped weights, are no steps.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._module, self._algorithm = fit.trainer.lightning_module, fit.config.algorithm
        self._layout: Layout | None = None  # that `_watched` was made for
        self._watched: list[Tensor] = []  # parameters
        self._steps = self._noted = 0
        self._warned = False

    def before_batch(self) -> None:
        """A batch begins. Only with manual optimization."""
        if self._module.automatic_optimization:
            return
        synchronizer = self._fit.synchronizer
        if synchronizer.layout is not self._layout:
            self._layout = synchronizer.layout
            self._watched = _trained(self._module, synchronizer.layout)
        self._steps, self._noted = synchronizer.stats.steps, _changes_of(self._watched)

    def after_batch(self) -> None:
        """Count a step if the batch has taken one."""
        if not self._module.automatic_optimization and self._found(self._fit.synchronizer):
            self._fit.count_own_step(None)

    def _found(self, synchronizer: Synchronizer) -> bool:
        """Whether to count such a step: the batch has taken one, and the algorithm pushes differences of weights."""
        payload = self._algorithm.payload
        if payload is Payload.LAYERS:  # gradients are exchanged during backward; a step may follow in a later batch
            return False
        if synchronizer.stats.steps != self._steps or _changes_of(self._watched) == self._noted:
            return False
        if payload is Payload.GRADIENT:
            self._warn()
        return payload is not Payload.GRADIENT

    def _warn(self) -> None:
        if not self._warned:
            log.warning(
                "A batch has changed weights, but none of the Trainer's optimizers has taken a step for it. %s pushes "
                "gradients, and those of such a step are not pushed. Expected configure_optimizers() to return every "
                "optimizer whose step() is called, or an algorithm that pushes differences of weights, such as ASGD.",
                type(self._algorithm).__name__,
            )
        self._warned = True


def _trained(module: Module, layout: Layout) -> list[Tensor]:
    """The parameters that are exchanged and that only steps change: with ``max_norm`` each forward does, too."""
    names = {spec.name for spec in layout.tensors} - normed_embeddings(module)
    return [p for name, p in module.named_parameters() if name in names]


def normed_embeddings(module: Module) -> set[str]:
    """Names of the weights that every forward changes, to keep them within a ``max_norm``."""
    layers = [each for each in module.modules() if isinstance(each, Embedding | EmbeddingBag)]
    normed = {id(layer.weight) for layer in layers if layer.max_norm is not None}
    return {name for name, parameter in module.named_parameters() if id(parameter) in normed}


def _changes_of(parameters: Iterable[Tensor]) -> int:
    """How often they were changed in place."""
    # Inference tensors, which nothing can train, have no count.
    return sum(parameter._version for parameter in parameters if not parameter.is_inference())
