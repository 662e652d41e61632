"""A worker's cache of rows of a served table: those that it used most recently."""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 8  # this part of the capacity is freed together


class RowCache:
    """Holds up to ``capacity`` rows of ``width`` scalars. Row numbers are given as int64, distinct and ascending.

    A row counts as missing ``max_age`` steps after it was fetched, since other workers may have changed it.
    """

    def __init__(self, capacity: int, width: int, max_age: int) -> None:
        self._max_age = max_age
        self._numbers = torch.empty(0, dtype=torch.int64)  # of the rows, ascending
        self._slots = torch.empty(0, dtype=torch.int64)  # where each of these rows is
        self._values = torch.empty(capacity, width, dtype=torch.float32)
        self._fetched = torch.zeros(capacity, dtype=torch.int64)  # the step at which each slot's row was
        self._used = torch.zeros(capacity, dtype=torch.int64)  # the step at which each slot's row was last used
        self._free = torch.arange(capacity)

    def __len__(self) -> int:
        return len(self._numbers)

    def missing(self, numbers: Tensor, step: int) -> Tensor:
        """Which of these rows have to be fetched."""
        found, slots = self._find(numbers)
        return self._missing(numbers, found, step - self._fetched[slots])

    def read(self, numbers: Tensor, step: int, out: Tensor) -> tuple[Tensor, int]:
        """Copy the rows that are cached to ``out``, shape ``(k, width)``.

        Returns which rows have to be fetched, and the sum over the others of the steps since each was fetched.
        """
        found, slots = self._find(numbers)
        self._used[slots] = step
        out[found] = self._values[slots]
        ages = step - self._fetched[slots]
        return self._missing(numbers, found, ages), int(ages[ages < self._max_age].sum())

    def put(self, numbers: Tensor, values: Tensor, step: int) -> None:
        """Cache fetched rows; if there are too many, they replace those that were used least recently."""
        found, slots = self._find(numbers)
        self._set(slots, values[found], step)
        new, values = numbers[~found], values[~found]
        new, values = new[-len(self._values) :], values[-len(self._values) :]
        self._make_room(len(new))
        slots, self._free = self._free[: len(new)], self._free[len(new) :]
        self._set(slots, values, step)
        self._add(new, slots)

    def refresh(self, numbers: Tensor, values: Tensor, step: int) -> None:
        """Update the values of those rows that are cached."""
        found, slots = self._find(numbers)
        self._values[slots] = values[found]
        self._fetched[slots] = step

    def clear(self) -> None:
        """Forget all rows."""
        self._free = torch.arange(len(self._values))
        self._numbers, self._slots = self._numbers[:0], self._slots[:0]

    def _missing(self, numbers: Tensor, found: Tensor, ages: Tensor) -> Tensor:
        """Which rows are not cached, or too old; ``ages`` are those of the cached ones."""
        fresh = found.clone()
        fresh[found] = ages < self._max_age
        return numbers[~fresh]

    def _find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some rows are cached, and the slots of these."""
        if not len(self._numbers):
            return torch.zeros(len(numbers), dtype=torch.bool), self._slots
        places = torch.searchsorted(self._numbers, numbers).clamp_(max=len(self._numbers) - 1)
        found = self._numbers[places] == numbers
        return found, self._slots[places[found]]

    def _add(self, numbers: Tensor, slots: Tensor) -> None:
        """Merge new rows into the ascending ones, which takes less than sorting all of them again."""
        places = torch.searchsorted(self._numbers, numbers).add_(torch.arange(len(numbers)))
        there = torch.ones(len(self._numbers) + len(numbers), dtype=torch.bool)
        there[places] = False
        before = there.nonzero().flatten()

        def merged(present: Tensor, added: Tensor) -> Tensor:
            both = torch.empty(len(there), dtype=torch.int64)
            both[places], both[before] = added, present
            return both

        self._numbers, self._slots = merged(self._numbers, numbers), merged(self._slots, slots)

    def _set(self, slots: Tensor, values: Tensor, step: int) -> None:
        self._values[slots] = values
        self._fetched[slots] = self._used[slots] = step

    def _make_room(self, count: int) -> None:
        surplus = count - len(self._free)
        if surplus <= 0:
            return
        surplus = min(max(surplus, len(self._values) // _AT_ONCE), len(self._slots))  # finding the oldest takes long
        oldest = self._used[self._slots].topk(surplus, largest=False).indices
        kept = torch.ones(len(self._slots), dtype=torch.bool)
        kept[oldest] = False
        self._free = torch.cat([self._free, self._slots[oldest]])
        self._numbers, self._slots = self._numbers[kept], self._slots[kept]
