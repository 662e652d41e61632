"""``nsync="restarted"``: the period that the theory of parallel restarted SGD gives, and its conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_asgd.algorithms.averaging import restarted_period


def restarted_nsync(steps: float, workers: int, optimizers: Sequence[Any], warn: Callable[[str], None]) -> int:
    """Steps between two exchanges, if each worker takes ``steps``; warns of conditions that do not hold."""
    if workers > 1 and steps < workers**3:
        warn(
            f"nsync='restarted': {workers} workers that take {steps:,.0f} steps each average after every step, because "
            f"the theory promises a linear speed-up of longer periods only from {workers**3:,} steps (workers cubed). "
            "Give nsync a number to average less often."
        )
    others = {type(each).__name__ for each in optimizers if type(each) is not torch.optim.SGD}
    if others:
        warn(
            f"nsync='restarted': the theory is about SGD, with or without momentum, not about "
            f"{', '.join(sorted(others))}. The period is the one for SGD."
        )
    return restarted_period(steps, workers)
