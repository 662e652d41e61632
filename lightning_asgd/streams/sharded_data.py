"""What is known of data that are read shard by shard, whichever library they are from."""

from __future__ import annotations

import hashlib
import io
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from lightning_asgd.core.foundation.numerics import as_bytes
from lightning_asgd.core.leases.random_numbers import RandomNumbers
from lightning_asgd.core.protocol import UNKNOWN


@dataclass(frozen=True)
class ShardedData:
    """Samples in shards.

    Attributes:
        lengths: number of samples of each shard; None where it is not known.
        read: takes an epoch, a shard and a position. Returns the shard's samples from there on, in an order that is the
            same for all workers in that epoch.
        shuffled: whether every epoch visits the shards in another order.
        batch: samples per batch, if the data set itself makes them; None if its dataloader does.
        collate: how it makes one from a list of samples.
        drop_last: whether the data set leaves out a last batch that is not full.
        name: what else must be equal on all workers, such as the state of random generators.
        seed: of the random numbers that its samples depend on, if they do; see :meth:`seeded`.
    """

    lengths: Sequence[int | None]
    read: Callable[[int, int, int], Iterator[Any]]
    shuffled: bool = False
    batch: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    drop_last: bool = False
    name: str = ""
    seed: int | None = None

    @property
    def samples(self) -> int | None:
        """Number of all samples; None where it is not known."""
        known = [length for length in self.lengths if length is not None]
        return sum(known) if len(known) == len(self.lengths) else None

    def order(self, epoch: int, seed: int) -> list[int]:
        """The shards with samples, in the order in which they are visited."""
        order = [shard for shard, length in enumerate(self.lengths) if length != 0]
        if self.shuffled:
            random.Random(f"{seed} {epoch}").shuffle(order)
        return order

    def ends(self, order: Sequence[int]) -> tuple[int, ...]:
        """One past the last number of each shard, where they are numbered in an order."""
        lengths = (self.lengths[shard] for shard in order)
        return tuple(accumulate(UNKNOWN if length is None else length for length in lengths))

    def examined(self, seed: int) -> tuple[ShardedData, bytes]:
        """The data as all workers can share them, and short bytes that are equal on two workers whose data are.

        Compared are the lengths, and the first sample of the first and of the last shard. If it depends on random
        numbers, every shard gets numbers of its own, which begin at the seed. The bytes are empty if a sample cannot be
        pickled.
        """
        total = hashlib.sha256(repr((tuple(self.lengths), self.shuffled, self.name)).encode())
        drawn = False
        for shard in {0, len(self.lengths) - 1} if self.lengths else ():
            numbers = RandomNumbers(seed)
            with numbers.use():
                samples = self.read(0, shard, 0)
                sample = next(samples, None)
                if hasattr(samples, "close"):
                    samples.close()
            drawn |= numbers.drawn
            try:
                total.update(_bytes(sample))
            except Exception:  # of the sample's own classes
                return self, b""
        return (self.seeded(seed) if drawn else self), total.digest()[:16]

    def seeded(self, seed: int) -> ShardedData:
        """The same with random numbers for every shard that are its own in every epoch, and begin at a seed."""
        read = self.read

        def repeatable(epoch: int, shard: int, start: int) -> Iterator[Any]:
            return _Drawing(lambda: read(epoch, shard, start), f"{seed} {epoch} {shard}")

        return replace(self, read=repeatable, seed=seed)


class _Drawing(Iterator[Any]):
    """Samples that depend on random numbers, which begin at a seed for them alone."""

    def __init__(self, make: Callable[[], Iterator[Any]], seed: str) -> None:
        self._numbers = RandomNumbers(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big"))
        with self._numbers.use():
            self._samples: Any = make()

    def __next__(self) -> Any:
        with self._numbers.use():
            return next(self._samples)

    def close(self) -> None:
        """Close what is read."""
        if hasattr(self._samples, "close"):
            self._samples.close()


class _Pickler(pickle.Pickler):
    """Writes a tensor's values: torch's own way depends on where they are in memory."""

    def reducer_override(self, part: Any) -> Any:
        if not isinstance(part, Tensor):
            return NotImplemented
        values = as_bytes(part.cpu())
        return _tensor, (tuple(part.shape), str(part.dtype), hashlib.sha256(values.numpy().data).digest())


def _tensor(*parts: Any) -> Any:
    """Stands for a tensor."""
    return parts


def _bytes(sample: Any) -> bytes:
    """A sample's contents."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=4)
    pickler.fast = True  # else bytes would depend on which of its parts are the same object
    pickler.dump(sample)
    return stream.getvalue()
