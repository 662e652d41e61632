"""When many workers finish their work, without a look at each. Pure: no network, no clock, no threads.

For a few workers :func:`~lightning_asgd.core.leases.self_scheduling.finish_s` counts every step. For many the count
is continuous: after its first step a worker trains at a steady rate, and half a step is subtracted for the one
in progress. The result differs by at most half a step of the slowest worker that takes part. Then sums suffice: of the
workers whose first step ends by some second, how many units their steps have, how many they train per second, and that
times the second. A Fenwick tree keeps these sums by the second, so that a change or a look takes one operation per bit
of a cell's number.
"""

from __future__ import annotations

from collections import Counter
from math import frexp
from typing import NamedTuple

from lightning_asgd.core.leases.self_scheduling import MUCH_FASTER, Load

ONE = 1 << 32  # sums are whole numbers of this part, so that they are exact, whatever their order
_CELLS = 1024  # per second: how exactly a worker's first end is known
_MIDDLE = 1 << 32  # cell of second 0, 48 days from the first cell
_LAST = _MIDDLE + (1 << 31)
FASTEST_S = 1e-9  # seconds per unit, at least: an inverse must be a number


def fixed(value: float) -> int:
    """A number as a whole number of small parts."""
    return round(value * ONE)


class Member(NamedTuple):
    """A worker in a crowd."""

    drift: int  # how its first end moves with the clock: 0 waits, its end is as far as ever; 1 fixed; -1 overdue
    end_s: float  # of its first step: from now, from second 0, or from now less the seconds since 0
    unit_s: float
    size: int  # units per step

    @property
    def rate(self) -> int:
        """Units per second."""
        return fixed(1 / self.unit_s)


class _Sums:
    """Sums over the members of one drift whose first ends lie before some second."""

    def __init__(self) -> None:
        self._nodes: dict[int, list[int]] = {}
        self._low, self._high = _MIDDLE - _CELLS, _MIDDLE + _CELLS  # all cells in use; powers of two from the middle

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def add(self, member: Member, count: int) -> None:
        """Add ``count`` members like this one; if it is negative, remove members that were added before."""
        index = min(max(1, int(member.end_s * _CELLS) + _MIDDLE), _LAST)
        rate = member.rate
        size, rate, work = count * member.size, count * rate, count * round(rate * member.end_s)
        nodes = self._nodes
        while index <= self._low:
            self._low = 2 * self._low - _MIDDLE
        while index > self._high:
            below, self._high = nodes.get(self._high), 2 * self._high - _MIDDLE
            if below is not None:
                nodes[self._high] = below.copy()  # it sums up the middle's upper half, of which there was no more
        while index <= self._high:
            node = nodes.get(index)
            if node is None:
                nodes[index] = [count, size, rate, work]
            elif node[0] + count:
                node[0] += count
                node[1] += size
                node[2] += rate
                node[3] += work
            else:
                del nodes[index]
            index += index & -index

    def until(self, second: float) -> tuple[int, int, int]:
        """Units of a step of each, units per second, and these times the seconds of the first ends."""
        index = min(max(0, int(second * _CELLS) + _MIDDLE - 1), _LAST)  # those in its own cell may end later
        size = rate = work = 0
        nodes, index = self._nodes, min(index, self._high)
        while index > self._low:
            node = nodes.get(index)
            if node is not None:
                size += node[1]
                rate += node[2]
                work += node[3]
            index &= index - 1
        return size, rate, work


class Crowd:
    """Workers whose speeds are known, and others, ``unpaced``, that train as fast as they do on average."""

    def __init__(self) -> None:
        self._members: Counter[Member] = Counter()  # until sums are first asked for: a few workers need none
        self._sums: dict[int, _Sums] = {}
        self._rate = 0
        self._unit_s = 0
        self._count = 0
        self._rates: dict[int, int] = {}  # by the exponent of the seconds per unit
        self.unpaced = 0
        self.now = 0.0

    def __len__(self) -> int:
        return self._count + self.unpaced

    def add(self, member: Member, sign: int = 1) -> None:
        """Add a member. With sign -1, remove a member that was added before."""
        if self._sums:
            self._sums[member.drift].add(member, sign)
        else:
            self._members[member] += sign
            if not self._members[member]:
                del self._members[member]
        self._rate += sign * member.rate
        self._unit_s += sign * fixed(member.unit_s)
        self._count += sign
        exponent = frexp(member.unit_s)[1]
        self._rates[exponent] = self._rates.get(exponent, 0) + sign * member.rate
        if not self._rates[exponent]:
            del self._rates[exponent]

    def are_sooner(self, units: float, than_s: float, than: Load, factor: float) -> bool:
        """See :class:`~lightning_asgd.core.leases.self_scheduling.Others`; here and below."""
        return self._trained(than_s / factor, than)[0] >= units

    def much_faster(self, than: Load) -> Faster | None:
        """Those that are surely much faster than a worker."""
        below = frexp(than.unit_s / MUCH_FASTER)[1]
        rate = sum(rate for exponent, rate in self._rates.items() if exponent < below)
        return Faster(self, rate / self._rate) if rate else None

    def finish_s(self, units: float, mine: Load, most_s: float) -> float:
        """Seconds until they and another worker have trained a number of units; from ``most_s`` on any that is more."""
        low, high, exact_s = 0.0, most_s, max(1 / _CELLS, mine.size * mine.unit_s / 16)
        trained, rate = self._trained(high, mine, takes_part=True)
        if trained < units:
            return most_s
        while high - low > exact_s:
            second = high - (trained - units) / rate - exact_s / 2 if rate else low  # a little below, to find a bound
            if not low < second < high:
                second = (low + high) / 2
            now, rate_there = self._trained(second, mine, takes_part=True)
            if now >= units:
                high, trained, rate = second, now, rate_there
            else:
                low = second
        return high

    def _trained(self, second: float, other: Load, *, takes_part: bool = False) -> tuple[float, float]:
        """Units that are probably trained by a second from now, and how many more per second."""
        trained = rate = 0.0
        if not self._sums:
            self._sums = {drift: _Sums() for drift in (-1, 0, 1)}
            for member, count in self._members.items():
                self._sums[member.drift].add(member, count)
            self._members.clear()
        for drift, sums in self._sums.items():
            if sums:
                at = second + drift * self.now
                size, per_s, work = sums.until(at)
                trained += size / 2 + (per_s * at - work) / ONE
                rate += per_s / ONE
        mean = (self._unit_s / ONE + other.unit_s) / (self._count + 1)
        for count, load in ((self.unpaced, Load(0.0, mean, other.size)), (takes_part, other)):
            end = load.free_s + load.size * load.unit_s
            if count and second >= end:
                trained += count * (load.size / 2 + (second - end) / load.unit_s)
                rate += count / load.unit_s
        return trained, rate


class Faster:
    """The part of a crowd that is much faster than a worker; for its speed it is taken to hold as much work as all."""

    def __init__(self, crowd: Crowd, part: float) -> None:
        self._crowd = crowd
        self._part = part

    def are_sooner(self, units: float, than_s: float, than: Load, factor: float) -> bool:
        """See :class:`Crowd`."""
        return self._crowd.are_sooner(units / self._part, than_s, than, factor)
