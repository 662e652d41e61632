"""Which workers have been silent for too long, mostly without a look at each. Pure: time is an argument."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

_SUSPENDED_S = 2.0  # a longer time between two looks: this process was suspended


class SilenceDetector:
    """Remembers when the longest-silent worker was heard, and looks at all once that one could be overdue."""

    def __init__(self) -> None:
        self._first_heard = -math.inf  # when all had been heard, as they were looked at, or earlier
        self._looked: float | None = None
        self._put_off = False  # whether the latest look came late

    def recheck(self) -> None:
        """Look at every worker next time: one may have been added, or its last heartbeat moved back."""
        self._first_heard = -math.inf

    def silent(
        self, heard: dict[int, float], there: Callable[[], Collection[int]], timeout_s: float, now: float
    ) -> list[int]:
        """The workers that are ``there`` and have been silent for longer than a time, in order.

        ``heard`` says when each was heard last. If this process was suspended, that is put off by as long.
        """
        suspended_s = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        late = suspended_s > _SUSPENDED_S
        if late and not self._put_off:  # no heartbeat could be taken; one late look after the other is a busy server
            heard.update({worker: at + suspended_s for worker, at in heard.items()})
        self._put_off = late
        if not timeout_s or now - self._first_heard <= timeout_s:
            return []
        at = {worker: heard.get(worker, now) for worker in there()}
        self._first_heard = min([now, *at.values()])  # those that join later are heard later
        return sorted(worker for worker, when in at.items() if now - when > timeout_s)
