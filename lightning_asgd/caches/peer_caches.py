"""A cache that is divided over machines: each sample has a home, which keeps it, and the others ask there.

Partitioned caching (Mohan et al. 2021, section 4): a sample that another machine has in memory comes faster over the
network than from storage, and all machines together read each sample from storage once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_asgd.caches.named_memory import named_memory
from lightning_asgd.core.calls.transport import Transport, answer_within
from lightning_asgd.core.foundation.errors import ConfigurationError, ProtocolError
from lightning_asgd.core.job.registry import kind_of
from lightning_asgd.core.protocol import Failure


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


if TYPE_CHECKING:
    from torch.futures import Future

log = logging.getLogger(__name__)

TRANSPORT = "zmq"
"""A transport that accepts no stranger is needed: samples are unpickled."""
_ANSWER_S = 5.0
_PAUSE_S = 60.0


class CacheServer:
    """Answers the other machines from this machine's cache until it is closed."""

    def __init__(self, cache: SampleCache, interface: str) -> None:
        self._cache = cache
        self._server = kind_of(TRANSPORT).serve(self._answer, "cache", interface)
        self.address: str = self._server.address
        """Where it listens."""

    def close(self) -> None:
        """Answer no more."""
        self._server.close()

    def _answer(self, message: Any) -> Any:
        match message:
            case ["get", list(indices)]:
                return [self._cache.get(self._checked(index)) for index in indices]
            case ["put", dict(samples)]:
                held = [self._cache.put(self._checked(index), sample) for index, sample in samples.items()]
                return all(held)
        raise ProtocolError("A message to a cache is neither a read nor a write of samples.")

    def _checked(self, index: Any) -> int:
        if type(index) is not int or not 0 <= index < self._cache.samples:
            raise ProtocolError(f"Sample {index!r} was asked for. Expected a number below {self._cache.samples}.")
        return index


class PeerCaches:
    """The caches of all machines. Sample *i* is at home on machine *i* modulo their number.

    Each process that uses it makes its own connections. A machine that does not answer is left alone for a minute; its
    samples are read from storage meanwhile.

    Args:
        addresses: of the machines' :class:`CacheServer`.
        mine: number of this machine.
    """

    def __init__(self, addresses: Sequence[str], mine: int) -> None:
        self._addresses, self._mine = tuple(addresses), mine
        self._silent_until: dict[int, float] = {}
        self._full: set[int] = set()
        self._connect()

    def _connect(self) -> None:
        """Begin without a connection, as a forked process does: its parent's threads are not there."""
        self._process = os.getpid()
        self._transport: Transport | None = None
        self._connecting = threading.Lock()
        self._writes: dict[int, Future[Any]] = {}  # the latest to each machine

    def __reduce__(self) -> Any:
        return PeerCaches, (self._addresses, self._mine)

    def keeps(self, index: int) -> bool:
        """Whether this machine is a sample's home."""
        return index % len(self._addresses) == self._mine

    def get(self, indices: Iterable[int]) -> dict[int, bytes]:
        """Those of the samples that the other machines hold."""
        if self._process != os.getpid():
            self._connect()
        asked = [(home, own, self._call(home, ["get", own])) for home, own in self._by_home(indices).items()]
        found: dict[int, bytes] = {}
        for home, own, future in asked:
            answer = self._answer(home, future) or []
            found.update((i, sample) for i, sample in zip(own, answer, strict=False) if sample is not None)
        return found

    def put(self, samples: Mapping[int, bytes]) -> None:
        """Send samples to their homes, unless these are full. Waits for what was sent there before, not for these."""
        if self._process != os.getpid():
            self._connect()
        for home, own in self._by_home(samples).items():
            before = self._writes.pop(home, None)
            if before is not None and self._answer(home, before) is False:
                self._full.add(home)
            if home not in self._full:
                self._writes[home] = self._call(home, ["put", {i: samples[i] for i in own}])

    def close(self) -> None:
        """Drop this process's connections."""
        with self._connecting:
            if self._transport is not None and self._process == os.getpid():
                self._transport.close()
                self._transport = None

    def _by_home(self, indices: Iterable[int]) -> dict[int, list[int]]:
        """The samples of each other machine that can be asked."""
        now, found = time.monotonic(), defaultdict[int, list[int]](list)
        for index in indices:
            home = index % len(self._addresses)
            if home != self._mine and self._silent_until.get(home, 0.0) <= now:
                found[home].append(index)
        return found

    def _call(self, home: int, message: Any) -> Future[Any]:
        with self._connecting:
            if self._transport is None or not self._transport.alive:
                self._transport = kind_of(TRANSPORT).connect(self._addresses, "")
            return self._transport.call(home, message, _ANSWER_S)

    def _answer(self, home: int, future: Future[Any]) -> Any:
        """What a machine answers; None if it does not."""
        try:
            answer = answer_within(future, _ANSWER_S + 1.0)
            if not isinstance(answer, Failure):
                return answer
            error: object = answer.message
        except RuntimeError as lost:
            error = lost
        self._silent_until[home] = time.monotonic() + _PAUSE_S
        log.warning(
            "The cache at %s does not answer: %s. Its samples are read from storage; it is asked again in %g s.",
            self._addresses[home],
            error,
            _PAUSE_S,
        )
        return None
