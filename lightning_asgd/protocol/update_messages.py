"""Weights and updates, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_asgd.layout import Groups
from lightning_asgd.protocol.request import Request
from lightning_asgd.stats import Verdict

__all__ = [
    "Exchange",
    "InitShard",
    "LayerGradient",
    "Reply",
    "Samples",
    "ShardState",
    "SharedRef",
    "nbytes",
]

_BULKY = 4 << 20  # bytes


@dataclass(frozen=True)
class SharedRef:
    """Where another process of the same machine finds a block of shared memory.

    Attributes:
        host: identity of the machine and of its process and network namespaces.
        pid: process that owns the block.
        fd: the block's file descriptor in that process.
        nonce: bytes at the block's start, by which a stale reference is noticed.
        nbytes: size of the block, header included.
    """

    host: str
    pid: int
    fd: int
    nonce: bytes
    nbytes: int


@dataclass(frozen=True)
class InitShard(Request):
    """Lay out a server's shard (every worker) and fill it (the first worker).

    Attributes:
        groups: ``(role, dtype name, number of scalars in this shard)`` per group.
        algorithm: what the server does with updates (:class:`lightning_asgd.algorithms.Algorithm`).
        weights: initial values, from one worker only; None from the others.
        version: version to start from, more than 0 when resumed from a checkpoint.
        shared: block through which this worker will exchange, None for by-value messages.
        fragment: number of the part of the module that the shard holds its share of.
        compression: code of what is sent by value (:class:`lightning_asgd.compression.Compression`); None for none.
    """

    groups: Groups
    algorithm: Any
    weights: tuple[Tensor, ...] | None = None
    version: int = 0
    shared: SharedRef | None = None
    fragment: int = 0
    compression: Any = None


@dataclass(frozen=True)
class Exchange(Request):
    """One push, one fetch, or a push with the fetch that answers it.

    Attributes:
        seq: number of this worker's push, counted from 1; a server applies each number once.
        base_version: version of the shard that the update is based on.
        push: whether an update is sent.
        fetch: whether the weights are wanted back.
        update: the update by value, per group a tensor or what a compression has made of it; None if nothing is pushed
            or if it is in the shared block.
        steps: optimizer steps in the update.
        lr: the worker's learning rate.
        speed: the worker's optimizer steps per second; 0 if it does not know yet.
        nsync: steps between two exchanges, as the user has set them.
        may_wait: whether the reply may be blocked until the other workers have caught up.
        rest: whether the worker stops at a sync point now, so that no worker waits for it.
        shared: whether update and answer go through the shared block.
        within_bounds: whether the worker has seen, while the update was in its cache, that all of it is finite and
            below the bound; it counts for shared memory only.
        fragment: number of the part of the module that is exchanged.
        full: whether the weights are wanted as they are, not compressed.
        common: at a sync point the digest of the last sync point's weights, if this worker holds them, else empty:
            those are wanted that all take; None elsewhere. See ``streams.Common``.
        epoch: the epoch that the worker claims units of; empty if it does not.
        units: units of it that the worker has trained since it began or rejoined, those of this push included.
        batch: samples of one of the worker's batches; 0 if it does not know.
    """

    seq: int
    base_version: int
    push: bool
    fetch: bool
    update: tuple[Any, ...] | None = None
    steps: int = 0
    lr: float = 0.0
    speed: float = 0.0
    nsync: int = 0
    may_wait: bool = False
    rest: bool = False
    shared: bool = False
    within_bounds: bool = False
    fragment: int = 0
    full: bool = False
    common: str | None = None
    epoch: str = ""
    units: int = 0
    batch: int = 0


def nbytes(parts: Sequence[Tensor | Sequence[Tensor]]) -> int:
    """Bytes of an update or of weights as they are sent: a tensor per group, or a coded group's tensors."""
    return sum(part.nbytes if isinstance(part, Tensor) else sum(tensor.nbytes for tensor in part) for part in parts)


@dataclass(frozen=True)
class Reply:
    """Answer to :class:`Exchange`.

    Attributes:
        version: number of updates the shard has applied, this one included.
        staleness: updates applied between the fetch the push was based on and the push; 0 without a push.
        verdict: what became of the push.
        weights: the shard by value, like the update; None if not asked for or if it is in the shared block.
        nsync: optimizer steps until the worker's next exchange; 0 if the server does not set it.
        busy_s: seconds that the server was busy with it.
        pushes: per worker, the latest push that the weights hold; empty if they were not asked for.
        epoch: the epoch that ``done`` is about: that of the message, or in an elastic run the latest.
        done: ranges of units of it whose updates the weights hold.
        incarnations: how often each worker was declared away; those that never were are left out.
        left: workers that are gone, and why.
        stopped: number of the collective in which a worker waits that trains no more; 0 if there is none.
    """

    version: int
    staleness: int
    verdict: Verdict
    weights: tuple[Any, ...] | None = None
    nsync: int = 0
    busy_s: float = 0.0
    pushes: dict[int, int] = field(default_factory=dict)
    epoch: str = ""
    done: tuple[tuple[int, int], ...] = ()
    incarnations: dict[int, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)
    stopped: int = 0

    @property
    def bulky(self) -> bool:
        """Whether it is worth a message more not to keep it until the next call."""
        return self.weights is not None and nbytes(self.weights) > _BULKY


@dataclass(frozen=True)
class ShardState(Request):
    """Fetch the state that a shard keeps besides its weights, or restore it.

    Attributes:
        fragment: number of the part of the module.
        state: the reply from when the checkpoint was written; None to fetch it.
    """

    fragment: int = 0
    state: Any = None


@dataclass(frozen=True)
class LayerGradient(Request):
    """One layer's gradient, to be answered with the mean of all workers'.

    Attributes:
        phase: number of sync points that the worker has passed.
        step: number of the step since the last one.
        layer: number of the layer.
        gradient: shape ``(n,)``, the layer's parameters one after the other; None: the worker ends the phase.
    """

    phase: int
    step: int
    layer: int
    gradient: Tensor | None


@dataclass(frozen=True)
class Samples(Request):
    """Ask for the copies of the weights that the algorithm had the shard keep.

    The answer is a list of ``(version, tuple of one tensor per group)``, oldest first.
    """
