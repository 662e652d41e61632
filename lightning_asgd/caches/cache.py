"""A dataset whose samples are kept in memory that all processes of a machine share."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset

from lightning_asgd.caches.named_memory import name_of
from lightning_asgd.caches.peer_caches import PeerCaches, SampleCache
from lightning_asgd.core.foundation.errors import ConfigurationError

log = logging.getLogger(__name__)


class CachedDataset(Dataset[Any]):
    """A map-style dataset whose samples are read from storage once, as long as there is room for them.

    All processes of this user on this machine whose sources pickle to the same bytes share one cache: a job's workers,
    their loader processes, other jobs that train on the same data. If a source holds a relative path of something
    that exists, they must have the same working directory too. A process that finds a cache compares a sample with
    what it reads itself, before it takes one from there or adds one to others. A source that cannot be pickled, or
    whose pickle differs from process to process, as that of a set of texts does, needs a ``name``; without one only
    loader processes share its cache. Samples that a source has gained since are read every time.

    Args:
        source: what reads: ``source[i]`` is a sample as it is stored, such as a file's bytes. Samples are kept
            pickled.
        limit_bytes: memory for all samples together, on one machine.
        prepare: turns a stored sample into a training sample, every time: decoding, random augmentation. None for
            nothing.
        partitioned: in a job on several machines, every machine keeps a part, and asks the others for theirs: together
            they hold ``limit_bytes`` times their number. Needs ``transport="zmq"``.
        name: processes whose data sets have the same one share a cache, instead of those whose sources pickle alike;
            in any working directory.

    Raises:
        ConfigurationError: the source has no length, or a limit is below 1.

    Example:
        >>> dataset = CachedDataset([b"one", b"two"], limit_bytes=1_000, prepare=bytes.decode)
        >>> dataset[1], dataset[1], len(dataset.cache)
        ('two', 'two', 1)
    """

    def __init__(
        self,
        source: Any,
        limit_bytes: int,
        prepare: Callable[[Any], Any] | None = None,
        *,
        partitioned: bool = False,
        name: str = "",
    ) -> None:
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ConfigurationError(
                f"CachedDataset was given {type(source).__name__}. Expected a map-style dataset, with a length."
            )
        self.source = source
        self.prepare = prepare
        self.partitioned = partitioned
        self.cache: SampleCache | None = SampleCache(len(source), int(limit_bytes), _name_of(source, name))
        self.peers: PeerCaches | None = None
        self._compares = self.cache.found

    def __getstate__(self) -> dict[str, Any]:
        """The same bytes in every process that has this data: the receiver compares, unless this one starts it."""
        return {**vars(self), "_compares": self._compares or get_spawning_popen() is None}

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        """A sample, prepared."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several of them, for which other machines are asked together."""
        stored = self._stored([range(len(self))[index] for index in indices])
        return stored if self.prepare is None else [self.prepare(sample) for sample in stored]

    def ask(self, peers: PeerCaches | None) -> None:
        """From now on share the work with other machines' caches; None: no more."""
        self.peers = peers
        self._compares |= peers is not None

    def _stored(self, indices: list[int]) -> list[Any]:
        held = self._held(indices)
        missing = [index for index in indices if index not in held]
        many = getattr(self.source, "__getitems__", None)
        read = many(missing) if missing and many else [self.source[index] for index in missing]
        self._keep(dict(zip(missing, read, strict=True)))
        fresh = iter(read)
        return [pickle.loads(held[index]) if index in held else next(fresh) for index in indices]

    def _held(self, indices: list[int]) -> dict[int, bytes]:
        if self.cache is None:
            return {}
        known = [index for index in indices if index < self.cache.samples]  # the source may have grown
        held = {index: sample for index in known if (sample := self.cache.get(index)) is not None}
        if self.peers is not None:
            held |= self.peers.get(index for index in known if index not in held)
        if held and self._compares and not self._fits(*next(iter(held.items()))):
            return {}
        return held

    def _fits(self, index: int, sample: bytes) -> bool:
        """Whether a sample that others have kept is what this process reads; if not, it shares no more."""
        self._compares = False
        if _equal(pickle.loads(sample), self.source[index]):
            return True
        log.warning(
            "Sample %d of %s differs from the copy that another process has cached: it is random, or the "
            "program has changed. Expected the same sample in every process. This process reads all of its "
            "samples from storage.",
            index,
            type(self.source).__name__,
        )
        self.cache = self.peers = None
        return False

    def _keep(self, samples: dict[int, Any]) -> None:
        if self.cache is None or not samples:
            return
        # Its maker compares nothing: it would train on what this process puts there.
        held = self.cache.first() if self._compares and self.cache.found else None
        if held is not None and not self._fits(*held):
            return
        kept = {index: _pickled(sample) for index, sample in samples.items() if index < self.cache.samples}
        for index, sample in kept.items():
            if self.peers is None or self.peers.keeps(index):
                self.cache.put(index, sample)
        if self.peers is not None:
            self.peers.put(kept)


def cached_dataset(dataset: Any) -> CachedDataset | None:
    """The cached dataset that a dataset is, or has as its ``dataset`` like a ``Subset``."""
    while not isinstance(dataset, CachedDataset):
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return dataset


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Of a view of a large tensor, keep only what it shows."""
        if (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and value.untyped_storage().nbytes() > value.nbytes
        ):
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return NotImplemented


def _pickled(sample: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(sample)
    return file.getvalue()


def _equal(one: Any, other: Any) -> bool:
    """Whether two samples are equal, as far as that can be seen: some classes' objects equal only themselves."""
    (mine, form), (theirs, other_form) = tree_flatten(one), tree_flatten(other)
    return form == other_form and all(map(_equal_leaves, mine, theirs))


def _equal_leaves(one: Any, other: Any) -> bool:
    by_identity: Any = object.__eq__
    if type(one) is not type(other) or getattr(one, "shape", None) != getattr(other, "shape", None):
        return False
    if type(one).__eq__ is by_identity:
        return True
    try:
        same = (one == other) | (one != one)  # a NaN is not equal to itself
        return bool(same.all() if hasattr(same, "all") else same)
    except Exception:  # whatever a class raises, which holds arrays for instance
        return True


def _name_of(source: Any, name: str) -> str:
    """What a source is called by all processes of this machine that have it; empty if that is not known."""
    try:
        return name_of(name or source, anywhere=bool(name))
    except Exception as error:  # whatever a class raises
        log.info("%s cannot be pickled (%s): other processes do not share its cache.", type(source).__name__, error)
        return ""
