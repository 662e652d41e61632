"""Samples in memory that all processes of a machine share."""

from __future__ import annotations

from typing import Any

from lightning_asgd.caches.named_memory import named_memory
from lightning_asgd.core.foundation.errors import ConfigurationError


class SampleCache:
    """Samples in shared memory, which stay once they are there.

    Nothing is ever evicted. An epoch reads every sample once, in random order, so a cache that evicts the least
    recently used sample often evicts samples that are needed soon. A cache that evicts nothing serves as large a share
    of all reads as it holds of the dataset (MinIO, Mohan et al. 2021, section 4).

    The memory is an anonymous file: it has no path, it is allocated as it is used, and it is freed with the last
    process that has it. Only pages that were written take memory.

    Args:
        samples: how many there may be.
        limit_bytes: of all of them.
        name: processes of this user on this machine that give the same one, and the same numbers, share the memory;
            without one, only this process and those that it starts.

    Raises:
        ConfigurationError: a number is below 1.
    """

    def __init__(self, samples: int, limit_bytes: int, name: str = "") -> None:
        if samples < 1 or limit_bytes < 1:
            raise ConfigurationError(
                f"SampleCache(samples={samples}, limit_bytes={limit_bytes}). Expected numbers of at least 1."
            )
        # bytes used, samples held, then for each sample where it ends and how long it is
        self._memory = named_memory(name, 2 + 2 * samples, limit_bytes)
        self._numbers = self._memory.numbers
        self.samples = samples

    def __getstate__(self) -> Any:
        return {"_memory": self._memory, "samples": self.samples}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)
        self._numbers = self._memory.numbers

    @property
    def found(self) -> bool:
        """Whether another process has made it."""
        return self._memory.found

    @property
    def held_bytes(self) -> int:
        """Bytes of the samples that it holds."""
        return int(self._numbers[0])

    def __len__(self) -> int:
        """How many samples it holds."""
        return int(self._numbers[1])

    def get(self, index: int) -> bytes | None:
        """What was put there, None if nothing was kept or the index is beyond ``samples``."""
        if index >= self.samples:
            return None
        end, size = self._entry(index)
        return self._memory.bytes[end - size : end] if end else None

    def first(self) -> tuple[int, bytes] | None:
        """The first sample that it holds, with its index; None if it holds none."""
        for index in range(self.samples if len(self) else 0):
            sample = self.get(index)
            if sample is not None:
                return index, sample
        return None

    def put(self, index: int, sample: bytes) -> bool:
        """Keep a sample if there is room, and its index is below ``samples``. Returns whether it is held."""
        if index >= self.samples:
            return False
        with self._memory.locked():
            if self._entry(index)[0]:
                return True
            end = self._memory.start + self._numbers[0] + len(sample)
            if end > len(self._memory.bytes):
                return False
            self._numbers[0] += len(sample)  # first: a process that ends here has taken the room
            self._memory.bytes[end - len(sample) : end] = sample
            self._numbers[2 + 2 * index + 1] = len(sample)
            self._numbers[1] += 1
            self._numbers[2 + 2 * index] = end  # last: a process that reads this finds the rest
            return True

    def _entry(self, index: int) -> tuple[int, int]:
        return self._numbers[2 + 2 * index], self._numbers[2 + 2 * index + 1]
