"""``nsync="auto"``: how often a worker exchanges if it is to cost next to nothing."""

from __future__ import annotations

import math
import statistics
from collections import deque

__all__ = ["Pace"]

_OVERHEAD = 0.025  # part of the training time that exchanges may take away, as far as a worker can measure it
_KEPT = 9  # exchanges that are looked at: odd, and enough for a median to ignore a disturbed one
_MOST = 10_000


class Pace:
    """The steps between two exchanges, from what the latest ones were like.

    An exchange is to be over before the next one falls due, and what it takes away from training, on the worker and on
    servers that share its machine, is to stay below 2.5 % of it. A smaller period would not bring more speed, only more
    staleness per exchange; a larger one would follow the others less closely for nothing.

    Args:
        first: what to say before anything is known.
    """

    def __init__(self, first: int) -> None:
        self.period = first
        self._steps: deque[float] = deque(maxlen=_KEPT)  # seconds each, as the three below
        self._trips: deque[float] = deque(maxlen=_KEPT)
        self._costs: deque[float] = deque(maxlen=_KEPT)

    def note(self, *, step_s: float, trip_s: float, cost_s: float) -> None:
        """Take notice of an exchange.

        It took ``step_s`` per optimizer step since the one before and ``trip_s`` until it was answered; for ``cost_s``
        nothing was trained because of it.
        """
        if step_s <= 0:
            return
        self._steps.append(step_s)
        self._trips.append(trip_s)
        self._costs.append(cost_s)
        step = statistics.median(self._steps)
        hidden = statistics.median(self._trips) / step
        cheap = statistics.median(self._costs) / (_OVERHEAD * step)
        self.period = min(_MOST, max(1, math.ceil(max(hidden, cheap))))
