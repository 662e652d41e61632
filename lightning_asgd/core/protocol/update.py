"""Weights and updates, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_asgd.core.foundation.layout import Groups
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol.request import Count, Fragment, LearningRate, PerSecond, Request

__all__ = ["Exchange", "InitShard", "Reply", "Rows", "ShardState", "SharedRef", "nbytes"]

_BULKY = 4 << 20  # bytes


@dataclass(frozen=True)
class SharedRef:
    """Where another process of the same machine finds a block of shared memory."""

    host: str  # identity of the machine and of its process and network namespaces
    pid: int  # process that owns the block
    fd: int  # the block's file descriptor in that process
    nonce: bytes  # at the block's start, by which a stale reference is noticed
    nbytes: int  # size of the block, header included


@dataclass(frozen=True)
class InitShard(Request):
    """Lay out a server's shard (every worker) and fill it (the first worker)."""

    groups: Groups  # `(role, dtype name, number of scalars in this shard)` per group
    algorithm: Any  # what the server does with updates (`Algorithm`)
    weights: tuple[Tensor, ...] | None = None  # initial values, from one worker only; None from the others
    version: int = 0  # version to start from, more than 0 when resumed from a checkpoint
    shared: SharedRef | None = None  # block through which this worker will exchange, None for by-value messages
    fragment: Fragment = 0  # number of the part of the module that the shard holds its share of
    compression: Any = None  # code of what is sent by value (`Compression`); None for none
    # Per group, the name of each tensor and the number of its scalars in this shard; none if no rule asks for them.
    tensors: tuple[tuple[tuple[str, int], ...], ...] = ()
    widths: tuple[int, ...] = ()  # scalars of a row, of each group of tables: these are the last groups
    in_parts: bool = False  # whether the processes of an island have brought the initial values: see `InitPart`
    restorable: bool = True  # whether this worker can bring the weights to a replacement, if the server is lost


@dataclass(frozen=True)
class Rows:
    """Rows of a group of tables: those that an update changes, or those of the weights that a worker lacks."""

    values: Tensor | None = None  # shape `(k * width,)`; None for no row
    numbers: Tensor | None = None  # shape `(k,)`, int32: which rows of the shard, ascending; None for all of them
    # A name of the weights with these rows: in a reply the worker's new ones, in a message its latest, or empty.
    at: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(each.nbytes for each in (self.values, self.numbers) if each is not None)


@dataclass(frozen=True)
class Exchange(Request):
    """One push, one fetch, or a push with the fetch that answers it."""

    seq: Count  # number of this worker's push, counted from 1; a server applies each number once
    base_version: int  # version of the shard that the update is based on
    push: bool  # whether an update is sent
    fetch: bool  # whether the weights are wanted back
    # The update by value, a tensor or its code per group (not of tables); None if empty or in the shared block.
    update: tuple[Any, ...] | None = None
    rows: tuple[Rows, ...] = ()  # the update of each group of tables, always by value
    steps: Count = 0  # optimizer steps in the update
    lr: LearningRate = 0.0  # the worker's learning rate
    speed: PerSecond = 0.0  # the worker's optimizer steps per second; 0 if it does not know yet
    nsync: int = 0  # steps between two exchanges, as the user has set them
    may_wait: bool = False  # whether the reply may be blocked until the other workers have caught up
    rest: bool = False  # whether the worker stops at a sync point now, so that no worker waits for it
    shared: bool = False  # whether update and answer go through the shared block
    # Whether the worker has checked the update while it was in its cache; for shared memory only.
    within_bounds: bool = False
    fragment: Fragment = 0  # number of the part of the module that is exchanged
    full: bool = False  # whether the weights are wanted as they are, not compressed
    # At a sync point the digest of the last sync point's weights, if this worker holds them, else empty: those are
    # wanted that all take; None elsewhere. See `SyncPointCodec`.
    common: str | None = None
    epoch: str = ""  # the epoch that the worker claims units of; empty if it does not
    units: Count = 0  # units of it that the worker has trained since it began or rejoined, those of this push included
    # Samples of a batch, or samples or tokens of one of this push's steps; 0 if unknown.
    batch: float = 0.0
    # Of an island: this exchange's number, see `ExchangePart`. 0 for a worker of one process.
    island: int = 0


def nbytes(parts: Sequence[Tensor | Sequence[Tensor]]) -> int:
    """Bytes of an update or of weights as they are sent: a tensor per group, or a coded group's tensors."""
    return sum(part.nbytes if isinstance(part, Tensor) else sum(tensor.nbytes for tensor in part) for part in parts)


@dataclass(frozen=True)
class Reply:
    """Answer to :class:`Exchange`."""

    version: int  # number of updates the shard has applied, this one included
    staleness: int  # updates applied between the fetch the push was based on and the push; 0 without a push
    verdict: Verdict  # what became of the push
    # The shard by value, like the update; None if not asked for or if it is in the shared block.
    weights: tuple[Any, ...] | None = None
    rows: tuple[Rows, ...] = ()  # of each group of tables the rows that the worker lacks; none if not asked for
    nsync: int = 0  # optimizer steps until the worker's next exchange; 0 if the server does not set it
    busy_s: float = 0.0  # seconds that the server was busy with it
    # Per worker, the latest push that the weights hold; empty if they were not asked for.
    pushes: dict[int, int] = field(default_factory=dict)
    # The epoch that `done` is about: that of the message, or in an elastic run the latest.
    epoch: str = ""
    done: tuple[tuple[int, int], ...] = ()  # ranges of units of it whose updates the weights hold
    # How often each worker was declared away; those that never were are left out.
    incarnations: dict[int, int] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)  # workers that are gone, and why
    stopped: int = 0  # number of the collective in which a worker waits that trains no more; 0 if there is none
    gain: float = 0.0  # by how much momentum lengthened the latest update, along itself; 0 if that is not known

    @property
    def has_data(self) -> bool:
        """Whether it holds weights."""
        return self.weights is not None

    @property
    def bulky(self) -> bool:
        """Whether it is worth a message more not to keep it until the next call."""
        return nbytes(self.weights or ()) + sum(rows.nbytes for rows in self.rows) > _BULKY


@dataclass(frozen=True)
class ShardState(Request):
    """Fetch the state that a shard keeps besides its weights, or restore it, or replace the weights themselves."""

    fragment: Fragment = 0  # number of the part of the module
    state: Any = None  # the reply from when the checkpoint was written; None to fetch it
    weights: tuple[Tensor, ...] | None = None  # what a program has set; while all workers are at a sync point
