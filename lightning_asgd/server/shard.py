"""One shard: its weights, its version, and what it does with a push. No network, no clock, no threads.

Weights travel two ways. *By value* a push arrives as fresh tensors: the result is written into them and they become
the weights, so an earlier answer that is still being sent keeps the old ones untouched. *Shared*, the update lies in
memory that the worker can read: weights change in place, chunk by chunk, and each chunk is copied back while it is in
the cache. The worker is told the version right after its own update either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_asgd.algorithms import ASGD
from lightning_asgd.errors import ProtocolError
from lightning_asgd.finite import is_finite
from lightning_asgd.layout import dtype_from_name
from lightning_asgd.messages import Exchange, Reply, Role, Verdict

__all__ = ["CHUNK", "Shard"]

CHUNK = 1 << 18
"""Scalars worked on at a time: 1 MiB of float32, so that two operands stay in a core's cache."""


@dataclass
class _Counts:
    applied: int = 0
    repeated: int = 0
    refused: int = 0
    fetched: int = 0


@dataclass
class Shard:
    """The weights of one server.

    Args:
        groups: ``(role, dtype name, number of scalars)`` per group.
        rule: how an update changes the weights.
    """

    groups: tuple[tuple[Role, str, int], ...]
    rule: ASGD
    version: int = 0
    weights: tuple[Tensor, ...] | None = None
    counts: _Counts = field(default_factory=_Counts)
    _last_seq: dict[int, int] = field(default_factory=dict)
    _lent: bool = False  # an answer by value may still be reading the weights

    @property
    def initialised(self) -> bool:
        """Whether the shard has weights."""
        return self.weights is not None

    def initialise(self, weights: Sequence[Tensor], version: int) -> None:
        """Take first weights.

        Args:
            weights: one tensor per group; copied if the caller may still change them is the caller's business.
            version: version to count on from.

        Raises:
            ProtocolError: the tensors do not fit the groups.
        """
        self._check(weights)
        self.weights = tuple(weights)
        self.version = version
        self._lent = False

    def exchange(
        self,
        message: Exchange,
        update: Sequence[Tensor] | None,
        live: int,
        shared: Sequence[Tensor] | None = None,
    ) -> Reply:
        """Apply a push once, and answer with the weights if they are wanted.

        Args:
            message: what the worker asks for.
            update: one tensor per group, given away by the caller; None if nothing is pushed or ``shared`` is given.
            live: number of workers that take part.
            shared: the worker's block, one tensor per group: holds the update on entry and the weights on return.

        Raises:
            ProtocolError: the shard has no weights yet, or the tensors do not fit its groups.
        """
        if self.weights is None:
            raise ProtocolError(
                f"Worker {message.worker} exchanged before the shard had weights. Expected worker 0 to initialise it."
            )
        pushed = shared if shared is not None else update
        verdict = Verdict.NONE
        staleness = 0
        if message.push:
            if pushed is None:
                raise ProtocolError(f"Worker {message.worker} pushed nothing: expected an update of {self.groups}.")
            self._check(pushed)
            verdict = self._judge(message, pushed)
        if verdict is Verdict.APPLIED:
            staleness = max(0, self.version - message.base_version)
            self._apply(pushed if pushed is not None else (), live, shared is not None, copy_back=message.fetch)
            self._last_seq[message.worker] = message.seq
            self.version += 1
        elif shared is not None and message.fetch:
            for block, values in zip(shared, self.weights, strict=True):
                block.copy_(values)
        answer: tuple[Tensor, ...] | None = None
        if message.fetch:
            self.counts.fetched += 1
            if shared is None:
                answer = self.weights
                self._lent = True
        return Reply(self.version, staleness, verdict, answer)

    def _judge(self, message: Exchange, update: Sequence[Tensor]) -> Verdict:
        if message.seq <= self._last_seq.get(message.worker, 0):
            self.counts.repeated += 1
            return Verdict.REPEATED
        if not all(is_finite(t) for t in update):
            self._last_seq[message.worker] = message.seq
            self.counts.refused += 1
            return Verdict.REFUSED
        self.counts.applied += 1
        return Verdict.APPLIED

    def _apply(self, update: Sequence[Tensor], live: int, in_place: bool, copy_back: bool) -> None:
        weights = self.weights or ()
        if in_place and self._lent:
            weights = self.weights = tuple(t.clone() for t in weights)
            self._lent = False
        for (role, _, _), w, u in zip(self.groups, weights, update, strict=True):
            out = w if in_place else u
            for a, b, c in zip(*(torch.split(t, CHUNK) for t in (w, u, out)), strict=True):
                self.rule.apply(role, a, b, live=live, out=c)
                if in_place and copy_back:
                    b.copy_(a)
        if not in_place:
            self.weights = tuple(update)
            self._lent = False

    def _check(self, tensors: Sequence[Tensor]) -> None:
        got = tuple((str(t.dtype).removeprefix("torch."), t.numel()) for t in tensors)
        expected = tuple((dtype, n) for _, dtype, n in self.groups)
        if got != expected:
            raise ProtocolError(
                f"A shard was sent tensors of (dtype, scalars) {got}. Expected {expected}. "
                "All workers and servers of a run must use the same module and version of this package."
            )

    def empty(self) -> tuple[Tensor, ...]:
        """Uninitialised tensors of the shard's shape."""
        return tuple(torch.empty(n, dtype=dtype_from_name(dtype)) for _, dtype, n in self.groups)
