"""Requirements of algorithms on the workers' own optimizers."""

from __future__ import annotations

from lightning_asgd.core.algorithms.base import Run
from lightning_asgd.core.foundation.errors import ConfigurationError


def needs_nesterov(algorithm: str, run: Run) -> None:
    """Raise a ``ConfigurationError`` unless all optimizers are SGD with Nesterov momentum."""
    for optimizer in run.optimizers:
        if not all(group.get("nesterov") and group.get("momentum", 0) > 0 for group in optimizer.param_groups):
            raise ConfigurationError(
                f"{algorithm} was given the optimizer {type(optimizer).__name__}. Expected "
                "torch.optim.SGD(..., momentum=0.9, nesterov=True): its momentum is part of the method."
            )
