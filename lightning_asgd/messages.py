"""The former place of :class:`~lightning_asgd.stats.Verdict`, for programs written for version 0.1."""

from __future__ import annotations

import warnings

from lightning_asgd.core.foundation.stats import Verdict

__all__ = ["Verdict"]

warnings.warn(
    "lightning_asgd.messages will be removed in the next release. Import Verdict from lightning_asgd.stats.",
    DeprecationWarning,
    stacklevel=2,
)
