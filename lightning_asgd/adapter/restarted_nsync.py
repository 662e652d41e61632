"""``nsync="restarted"``: the period that the theory of parallel restarted SGD gives for a fit, and its conditions."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_asgd.adapter.class_trees import rank_zero_warn
from lightning_asgd.algorithms.averaging import restarted_period
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.errors import ConfigurationError

__all__ = ["restarted_nsync"]


def restarted_nsync(config: ExchangeConfig, trainer: Any, workers: int) -> int:
    """Steps between two exchanges, 0 without ``nsync="restarted"``; warns of conditions that do not hold.

    See :func:`~lightning_asgd.algorithms.averaging.restarted_period`.

    Raises:
        ConfigurationError: the number of steps that each worker takes is not known.
    """
    if not config.restarted:
        return 0
    steps, optimizers = trainer.estimated_stepping_batches, trainer.optimizers
    if not 0 < steps < math.inf:
        raise ConfigurationError(
            f"nsync='restarted' follows from the number of steps, which is {steps}. Expected a Trainer with "
            "max_steps=..., or with max_epochs=... and data that have a length."
        )
    if workers > 1 and steps < workers**3:
        rank_zero_warn(
            f"nsync='restarted': {workers} workers that take {steps:,.0f} steps each average after every step, since "
            f"the theory promises a linear speed-up of longer periods only from {workers**3:,} steps (workers cubed). "
            "Give nsync a number to average less often."
        )
    others = {type(each).__name__ for each in optimizers if type(each) is not torch.optim.SGD}
    if others:
        rank_zero_warn(
            f"nsync='restarted': the theory is about SGD, with or without momentum, not about "
            f"{', '.join(sorted(others))}. The period is the one for SGD."
        )
    return restarted_period(steps, workers)
