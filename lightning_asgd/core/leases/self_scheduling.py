"""How many units to grant a worker, from the speeds of all workers: guided self-scheduling. Arithmetic without state.

A worker is granted half of its expected share of what is left, and single steps near the end, so that all workers have
trained and pushed at about the same time.

Reference:
    Polychronopoulos and Kuck, "Guided Self-Scheduling" (1987).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

_CHUNK_S = 0.5  # seconds of work in one grant, at most: if a worker slows down, the others may wait for this
_TRIPS = 2.0  # the same in round trips, if these take longer: else the worker would run out of work
_LATE = 1.05  # a step is granted only if its worker finishes within this factor of the others
# A much slower worker saves the others almost nothing by training a unit: it has to finish sooner.
MUCH_FASTER = 4.0
_SOONER = 0.85


class Load(NamedTuple):
    """A worker, as far as scheduling is concerned."""

    free_s: float  # seconds until it has trained what it holds, and pushed
    unit_s: float  # seconds per unit
    size: int  # units per step


class Sooner(Protocol):
    """Workers that may finish sooner than another."""

    def are_sooner(self, units: int, than_s: float, than: Load, factor: float) -> bool:
        """Whether ``factor`` times the seconds that they need for some units is less than ``than_s``, of ``than``."""


class Others(Sooner, Protocol):
    """The other workers."""

    def __len__(self) -> int: ...

    def much_faster(self, than: Load) -> Sooner | None:
        """Those that are much faster than a worker; None if there are none."""

    def finish_s(self, units: int, mine: Load, most_s: float) -> float:
        """Seconds until they and another worker have trained some units. From ``most_s`` on it need not be exact."""


class Few:
    """Others that are few enough to look at each."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads

    def __len__(self) -> int:
        return len(self._loads)

    def are_sooner(self, units: int, than_s: float, than: Load, factor: float) -> bool:
        """See :class:`Others`."""
        return than_s > factor * finish_s(self._loads, units)

    def much_faster(self, than: Load) -> Few | None:
        """See :class:`Others`."""
        faster = [load for load in self._loads if load.unit_s * MUCH_FASTER < than.unit_s]
        return Few(faster) if faster else None

    def finish_s(self, units: int, mine: Load, most_s: float) -> float:
        """See :class:`Others`."""
        return finish_s([*self._loads, mine], units)


def steps_to_grant(mine: Load, others: Sequence[Load] | Others, left: int, rtt_s: float, *, must: bool) -> int:
    """How many steps to grant: half of a worker's share of what is left; none if the others finish sooner without it.

    ``must``: no other worker will return for what is left, so this one need not finish sooner than much faster ones.
    """
    crew = Few(others) if isinstance(others, Sequence) else others
    finish = mine.free_s + min(mine.size, left) * mine.unit_s
    if len(crew) and crew.are_sooner(left, finish, mine, _LATE):
        return 0
    faster = None if must else crew.much_faster(mine)
    if faster is not None and faster.are_sooner(left, finish, mine, _SOONER):
        return 0
    most_s = max(_CHUNK_S, _TRIPS * rtt_s)
    share = max(0.0, crew.finish_s(left, mine, mine.free_s + 2 * most_s) - mine.free_s) / mine.unit_s
    units = max(share / 2, min(share, rtt_s / mine.unit_s))  # enough until the next reply
    units = min(units, most_s / mine.unit_s)
    return max(1, int(units / mine.size))


def finish_s(loads: Sequence[Load], units: int) -> float:
    """Seconds until the workers have trained a number of units in whole steps, if none idles."""
    rate = busy = time = 0.0
    ordered = sorted(loads)
    for index, (free, unit_s, _) in enumerate(ordered):
        rate += 1 / unit_s
        busy += free / unit_s
        time = (units + busy) / rate  # if units could be cut in pieces
        if index + 1 == len(ordered) or time <= ordered[index + 1].free_s:
            break
    trained = [max(0, int((time - free) / unit_s / size)) * size for free, unit_s, size in ordered]
    while sum(trained) < units:
        ends = [free + (n + size) * unit_s for n, (free, unit_s, size) in zip(trained, ordered, strict=True)]
        time = min(ends)
        soonest = ends.index(time)
        trained[soonest] += ordered[soonest].size
    return time
