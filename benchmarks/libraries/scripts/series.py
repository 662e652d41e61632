"""Time series for the forecasting libraries: a weekly wave with a trend and noise, and the true values after it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["AHEAD", "BACK", "SERIES", "waves"]

SERIES, STEPS, AHEAD, BACK = 32, 120, 7, 21


def waves() -> tuple[Any, Any]:
    """Known values, a row per series, and the values to foretell."""
    random = np.random.default_rng(0)
    at = np.arange(STEPS + AHEAD)
    phase, height = random.uniform(0, 7, (SERIES, 1)), random.uniform(0.5, 2, (SERIES, 1))
    values = height * np.sin(2 * np.pi * (at + phase) / 7) + 0.002 * at + random.normal(0, 0.05, (SERIES, len(at)))
    values = values.astype("float32")
    return values[:, :STEPS], values[:, STEPS:]
