"""A cache for datasets, in memory that all processes of a data loader share."""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

from torch.utils.data import Dataset

from lightning_asgd.errors import ConfigurationError

__all__ = ["CachedDataset", "SampleCache"]

_ENTRY = 8  # bytes of a number in shared memory


class SampleCache:
    """Samples in shared memory, which stay once they are there.

    Nothing is ever evicted. An epoch reads every sample once, in random order, so a cache that evicts the least
    recently used sample often evicts samples that are needed soon. A cache that evicts nothing serves as large a share
    of all reads as it holds of the dataset (MinIO, Mohan et al. 2021, section 4).

    The memory is an anonymous file: it has no name, it is allocated as it is used, and it is freed with the last
    process that has it. Only pages that were written take memory.

    Args:
        samples: how many there may be.
        limit_bytes: of all of them.

    Raises:
        ConfigurationError: a number is below 1.
    """

    def __init__(self, samples: int, limit_bytes: int) -> None:
        if samples < 1 or limit_bytes < 1:
            raise ConfigurationError(
                f"SampleCache(samples={samples}, limit_bytes={limit_bytes}). Expected numbers of at least 1."
            )
        self._attach(os.memfd_create("samples"), samples, limit_bytes)

    def _attach(self, file: int, samples: int, limit_bytes: int) -> None:
        self._file = file
        self._samples, self._limit = samples, limit_bytes
        # bytes used, samples held, then for each sample where it ends and how long it is
        self._data = _ENTRY * (2 + 2 * samples)
        os.ftruncate(file, self._data + limit_bytes)
        self._memory = mmap.mmap(file, self._data + limit_bytes)
        self._numbers = memoryview(self._memory)[: self._data].cast("q")
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return _attached, (DupFd(self._file), self._samples, self._limit)

    def __del__(self) -> None:
        if hasattr(self, "_numbers"):
            self._numbers.release()
            self._memory.close()
            os.close(self._file)

    @property
    def held_bytes(self) -> int:
        """Bytes of the samples that it holds."""
        return int(self._numbers[0])

    def __len__(self) -> int:
        """How many samples it holds."""
        return int(self._numbers[1])

    def get(self, index: int) -> bytes | None:
        """What was put there, None if nothing was kept."""
        end, size = self._entry(index)
        return self._memory[end - size : end] if end else None

    def put(self, index: int, sample: bytes) -> bool:
        """Keep a sample if there is room for it.

        Returns:
            whether it is held.
        """
        with self._locked():
            if self._entry(index)[0]:
                return True
            end = self._data + self._numbers[0] + len(sample)
            if end > len(self._memory):
                return False
            self._memory[end - len(sample) : end] = sample
            self._numbers[2 + 2 * index + 1] = len(sample)
            self._numbers[2 + 2 * index] = end  # last: a process that reads this finds the rest
            self._numbers[0] += len(sample)
            self._numbers[1] += 1
            return True

    def _entry(self, index: int) -> tuple[int, int]:
        return self._numbers[2 + 2 * index], self._numbers[2 + 2 * index + 1]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:  # among threads; the other is among processes
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


def _attached(file: Any, samples: int, limit_bytes: int) -> SampleCache:
    cache = SampleCache.__new__(SampleCache)
    cache._attach(file.detach(), samples, limit_bytes)
    return cache


class CachedDataset(Dataset[Any]):
    """A map-style dataset whose samples are read from storage once, as long as there is room for them.

    Args:
        source: what reads: ``source[i]`` is a sample as it is stored, such as a file's bytes. Samples are kept
            pickled.
        limit_bytes: memory for all samples together, shared by all processes of a loader.
        prepare: turns a stored sample into a training sample, every time: decoding, random augmentation. None for
            nothing.

    Raises:
        ConfigurationError: the source has no length, or a limit is below 1.

    Example:
        >>> dataset = CachedDataset([b"one", b"two"], limit_bytes=1_000, prepare=bytes.decode)
        >>> dataset[1], dataset[1], len(dataset.cache)
        ('two', 'two', 1)
    """

    def __init__(self, source: Any, limit_bytes: int, prepare: Callable[[Any], Any] | None = None) -> None:
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ConfigurationError(
                f"CachedDataset was given {type(source).__name__}. Expected a map-style dataset, with a length."
            )
        self.source = source
        self.prepare = prepare
        self.cache: SampleCache | None = SampleCache(len(source), int(limit_bytes))

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        """A sample, prepared."""
        sample = self._fetch(int(index))
        return sample if self.prepare is None else self.prepare(sample)

    def _fetch(self, index: int) -> Any:
        if self.cache is None:
            return self.source[index]
        held = self.cache.get(index)
        if held is not None:
            return pickle.loads(held)
        sample = self.source[index]
        self.cache.put(index, pickle.dumps(sample, protocol=pickle.HIGHEST_PROTOCOL))
        return sample
