"""When an island's processes next look together what has become of an exchange. Pure: time is an argument.

In every look they wait for each other. A worker of one process looks between any two batches, since that costs it
nothing.
"""

from __future__ import annotations

from lightning_asgd.core.worker.exchange_period import Schedule

_MOST = 64  # steps
_LATE = 8  # an answer is noticed late by at most an eighth of its round trip, or by one step


def steps_to_look(
    schedule: Schedule, steps: int, looked: int, since_s: float | None, step_s: float, *, offline: int
) -> int:
    """After how many more steps one exchange is to be looked at; 0: before the next batch.

    ``looked``: steps taken at the latest look. ``since_s``: since an unanswered exchange began; None if none is in
    flight. ``step_s``: seconds per step, 0 if unknown. ``offline``: steps that the worker may take without an exchange.
    """
    due = next((more for more in range(_MOST) if any(schedule.due(steps + more, more))), _MOST)
    if since_s is None:
        return due or int(looked == steps)  # it was not begun, since a sync point is near
    if due == 0 and not any(schedule.due(looked, looked - steps)):
        return 0  # it is deferred, which counts once
    expected_s = max(schedule.trip_s - since_s, since_s / _LATE)
    looks = max(1, min(_MOST, round(expected_s / step_s) if step_s else 1))
    return min(looks, due or max(0, offline - schedule.since_push))
