"""Replicas that push gradients or weights instead of differences, or mix weights instead of rebasing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.base import Algorithm, Payload
from lightning_asgd.core.calls.shared_memory import SharedBlock
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.replica_spans import Place, Span


class GradientReplica(Replica):
    """Pushes the sum of its gradients since the last push. Takes one vector more, or up to three if it remembers."""

    _pushes_gradients = True
    _derives = False

    def __init__(self, *about: Any, **how: Any) -> None:
        super().__init__(*about, **how)
        self._accrued = {i: torch.zeros_like(r.base) for i, r in enumerate(self._spans)}
        self._pushed = {
            i: torch.zeros_like(accrued)
            for i, accrued in self._accrued.items()
            if self.remembers and self.blocks[self._spans[i].server] is not None
        }
        self._index = {id(r): i for i, r in enumerate(self._spans)}

    def accrue(self, skipped: bool | Tensor = False) -> None:
        """Add this step's gradients. Those of a skipped step are infinite."""
        if skipped is True:
            return
        with torch.no_grad():
            if self.rows is not None:
                self.rows.accrue(skipped)
            dense = {tensor for r in self._spans for tensor, _ in r.places}
            gradients = {tensor: _flat(self._places[tensor][0][self._places[tensor][1]].grad) for tensor in dense}
            for i, accrued in self._accrued.items():
                r = self._spans[i]
                for part, (tensor, where) in zip(torch.split(accrued, r.sizes), r.places, strict=True):
                    gradient = gradients[tensor]
                    if gradient is None:
                        continue
                    mine = gradient[where]
                    if isinstance(skipped, Tensor):
                        mine = torch.where(skipped.to(mine.device) != 0, 0, mine)
                    part.add_(mine)

    def _pack(self, r: Span, x: Tensor, before: Tensor) -> None:
        index = self._index[id(r)]
        accrued = self._accrued[index]
        r.wire.copy_(accrued, non_blocking=self._non_blocking)
        if index in self._pushed:
            self._accrued[index], self._pushed[index] = self._pushed[index], accrued
        self._accrued[index].zero_()
        r.base.copy_(x)

    def drop_block(self, server: int) -> None:
        """See :class:`Replica`."""
        super().drop_block(server)
        if self.blocks[server] is None:
            for i in [i for i in self._pushed if self._spans[i].server == server]:
                del self._pushed[i]

    def _pack_again(self, r: Span) -> None:
        r.wire.copy_(self._pushed[self._index[id(r)]])

    def _merge(self, r: Span, x: Tensor, answer: Tensor, pushed: bool, fresh: bool, alone: bool) -> None:
        super()._merge(r, x, answer, pushed, fresh, alone=False)  # the servers' optimizer took the steps, not this one

    def _adopt(self, r: Span, x: Tensor, answer: Tensor, park: bool, alone: bool) -> None:
        self._accrued[self._index[id(r)]].zero_()
        super()._adopt(r, x, answer, park, alone=False)


class MixingReplica(Replica):
    """Merges as ``x = mix x + (1 - mix) r``, instead of keeping all that was trained since the push."""

    def __init__(self, mix: float, *about: Any, **how: Any) -> None:
        super().__init__(*about, **how)
        self._mix = mix

    def _merge(self, r: Span, x: Tensor, answer: Tensor, pushed: bool, fresh: bool, alone: bool) -> None:
        if not pushed:  # the worker's steps are on no server yet, and mixing would drop a part of them
            super()._merge(r, x, answer, pushed, fresh, alone)
            return
        x.lerp_(answer.to(x.device), 1 - self._mix)
        r.base.copy_(answer)


class ElasticReplica(Replica):
    """Keeps weights of its own, which a force pulls towards the servers'. ``base`` holds them during a sync point."""

    _parked = False

    def _pack(self, r: Span, x: Tensor, before: Tensor) -> None:
        r.wire.copy_(x, non_blocking=self._non_blocking)

    def _merge(self, r: Span, x: Tensor, answer: Tensor, pushed: bool, fresh: bool, alone: bool) -> None:
        if pushed:
            x.sub_(answer.to(x.device))

    def _difference(self, x: Tensor, answer: Tensor) -> Tensor:
        return answer  # the force: the difference times a factor that the servers know

    def _agreed(self, r: Span) -> Tensor:
        return r.wire  # the base holds what was parked

    def adopt(self, answers: Sequence[tuple[Tensor, ...]], *, park: bool = False, alone: bool = False) -> None:
        """See :class:`Replica`."""
        super().adopt(answers, park=park and not self._parked, alone=alone)
        self._parked = self._parked or park

    def _go_ahead(self, r: Span, x: Tensor, answer: Tensor) -> None:
        x.copy_(answer)  # the centre is the model

    def _adopt(self, r: Span, x: Tensor, answer: Tensor, park: bool, alone: bool) -> None:
        if park:
            r.base.copy_(x)
        x.copy_(answer)
        if r.wire.data_ptr() != answer.data_ptr():
            r.wire.copy_(answer)

    def forget_parked(self) -> None:
        """See :class:`Replica`."""
        self._parked = False

    def resume(self) -> None:
        """See :class:`Replica`. What a program has changed meanwhile is kept."""
        if not self._parked:
            return
        self._parked = False
        with torch.no_grad():
            for r, x in self._values(write=True):
                x.sub_(r.wire.to(x.device)).add_(r.base.to(x.device))


def replica_for(
    algorithm: Algorithm,
    layout: Layout,
    places: Sequence[Place],
    blocks: Sequence[SharedBlock | None],
    *,
    remembers: bool = False,
    offload: bool = False,
) -> Replica:
    """The replica that pushes and merges as an algorithm wants; see :class:`Replica` for the other arguments."""
    how = {"remembers": remembers, "offload": offload}
    if algorithm.payload is Payload.GRADIENT:
        return GradientReplica(layout, places, blocks, **how)
    if algorithm.payload is Payload.WEIGHTS:
        return ElasticReplica(layout, places, blocks, offload=offload)
    if algorithm.mix is not None:
        return MixingReplica(algorithm.mix, layout, places, blocks, **how)
    return Replica(layout, places, blocks, **how)


def _flat(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else (gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1)
