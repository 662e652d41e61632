"""When a worker exchanges; with ``nsync="auto"`` as often as costs next to nothing."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from lightning_asgd.core.algorithms.config import ExchangeConfig

_OVERHEAD = 0.025  # share of training time that exchanges may cost, as far as a worker can measure it
_EARLY, _EARLY_STEPS = 0.25, 64  # the share during a worker's first steps; then it falls as 1 / steps
_KEPT = 9  # exchanges in the window: odd, and enough for a median to ignore an outlier
_MOST = 10_000
_FORGET = 0.8  # weight at a sync point of how long an exchange took


class Pace:
    """The steps between two exchanges, from what the latest ones were like; ``first`` until some are measured.

    An exchange should end before the next one is due, and its cost to training, on the worker and on servers that share
    its machine, should stay below 2.5 %. A longer period would make the worker follow the others less closely, and save
    nothing that can be measured. Long periods harm most early in training (Lin et al., "Don't Use Large Mini-Batches,
    Use Local SGD", ICLR 2020). So exchanges may cost a quarter of the time for 64 steps, then 16 / n after n steps.
    """

    def __init__(self, first: int) -> None:
        self.period = first
        self._steps: deque[float] = deque(maxlen=_KEPT)  # seconds each, as the three below
        self._trips: deque[float] = deque(maxlen=_KEPT)
        self._costs: deque[float] = deque(maxlen=_KEPT)

    def note(self, steps: int, *, step_s: float, trip_s: float, cost_s: float) -> None:
        """Record an exchange.

        It began after ``steps``. Those since the previous exchange took ``step_s`` each, its answer took ``trip_s``,
        and it stopped training for ``cost_s``.
        """
        if step_s <= 0:
            return
        self._steps.append(step_s)
        self._trips.append(trip_s)
        self._costs.append(cost_s)
        step = statistics.median(self._steps)
        hidden = statistics.median(self._trips) / step
        share = min(_EARLY, max(_OVERHEAD, _EARLY * _EARLY_STEPS / max(steps, 1)))
        cheap = statistics.median(self._costs) / (share * step)
        self.period = min(_MOST, max(1, math.ceil(max(hidden, cheap))))


class Turns:
    """The order in which a worker pushes its fragments in lock-step.

    Two workers with different periods could each wait until the other one pushes another fragment. If all workers push
    the fragments in the same order, this cannot happen.
    """

    def __init__(self, fragments: int, config: ExchangeConfig) -> None:
        self.fragments = fragments
        self.stops = not config.overlap
        """Whether the worker stops for each answer: with ``overlap=False``, unless it has rejoined out of step."""
        self._config, self._ordered, self._next = config, fragments > 1 and config.algorithm.lockstep, 0

    def lead(self, fragment: int) -> int:
        """Steps by which a fragment's first exchange comes earlier than after ``nsync``."""
        return self._config.npush * (self.fragments - 1 - fragment) // self.fragments

    def holds(self, fragment: int) -> bool:
        """Whether another fragment is pushed before this one."""
        return self._ordered and fragment != self._next

    def taken(self, fragment: int) -> None:
        """Note that a fragment is pushed."""
        self._next = (fragment + 1) % self.fragments

    def again(self, fragment: int) -> None:
        """Have a fragment pushed next: the others wait for it."""
        self._next = fragment

    def restart(self, *, in_step: bool = True) -> None:
        """Begin with the first fragment. A worker that is not in step with the others does not stop for answers."""
        self._next, self.stops = 0, not self._config.overlap and (in_step or not self._ordered)


class Schedule:
    """When a channel's next push and fetch are due, and how long an exchange takes.

    The first push and fetch are due ``lead`` steps earlier than later ones. ``given`` is the period that follows from
    the run; 0 if it does not.
    """

    def __init__(
        self,
        config: ExchangeConfig,
        lead: int,
        given: Callable[[], int] = lambda: 0,
        turns: Turns | None = None,
        fragment: int = 0,
    ) -> None:
        self.since_push = 0  # steps
        self.since_fetch = 0
        self.trip_s = 0.0  # expected duration of an exchange: the shorter of the latest two
        self.busy_s = 0.0  # spent on exchanges since the latest push began
        self._config, self._turns, self._fragment = config, turns or Turns(1, config), fragment
        self._lead = self._first_lead = lead
        self._given = given
        self._latest_s = 0.0  # that the latest exchange took
        self._auto = Pace(1 if self._turns.fragments == 1 else config.npush) if config.auto else None
        self._wished: int | None = None  # steps between two exchanges that the servers want
        self._began: tuple[int, float] | None = None  # steps taken and the time when the latest push began

    @property
    def npush(self) -> int:
        """Steps between two pushes that this worker wants."""
        return self._given() or (self._config.npush if self._auto is None else self._auto.period)

    @property
    def nsync(self) -> int:
        """Steps between two pushes."""
        return self._wished or self.npush

    def due(self, steps: int, more: int = 0) -> tuple[bool, bool]:
        """Whether a push and a fetch are due, given the number of steps; ``more`` of them are still to be taken."""
        if self._turns.holds(self._fragment):
            return False, False
        nfetch = self._wished or (self.npush if self._auto or self._config.restarted else self._config.nfetch)
        period = self._config.algorithm.period
        return (
            self.since_push + more + self._lead >= period(self.nsync, steps),
            self.since_fetch + more + self._lead >= period(nfetch, steps),
        )

    def pushed(self, steps: int, now: float, *, rest: bool) -> tuple[float, float]:
        """Note that a push begins. Returns steps per second since the one before, and seconds of training per step."""
        speed = step_s = 0.0
        self.since_push = 0
        if not rest:
            self._lead = 0
            self._turns.taken(self._fragment)
        if self._began is not None and now > self._began[1] and steps > self._began[0]:
            taken, seconds = steps - self._began[0], now - self._began[1]
            speed, step_s = taken / seconds, max(0.0, seconds - self.busy_s) / taken
        self.busy_s = 0.0
        self._began = steps, now
        return speed, step_s

    def replied(self, nsync: int, *, refused: bool = False) -> None:
        """Use the period that the servers ask for, 0 if they ask for none. A fragment that they refused is next."""
        self._wished = nsync if nsync not in (0, self.npush) else None
        if refused:
            self._turns.again(self._fragment)

    def answered(self, steps: int, *, step_s: float, trip_s: float, cost_s: float, sync: bool) -> None:
        """Note what an exchange that began after ``steps`` took, at a sync point or not; see :meth:`Pace.note`."""
        self.trip_s, self._latest_s = min(trip_s, self._latest_s or trip_s), trip_s
        if self._auto is not None and not sync:
            self._auto.note(steps, step_s=step_s, trip_s=trip_s, cost_s=cost_s)

    def pause(self) -> None:
        """Leave a sync point, whose time counts for no step, and after which fragments take turns as at first."""
        self._began, self._lead = None, self._first_lead
        self._turns.restart()

    def rejoin(self) -> None:
        """Rejoin, while the other workers may be at another fragment."""
        self._turns.restart(in_step=False)

    def forget_trip(self) -> None:
        """Discount the latest duration: otherwise no exchange would follow a very long one."""
        self.trip_s *= _FORGET
