"""The form in which each worker's updates come and weights go: plain, in shared memory, or compressed."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from lightning_asgd.compression.streams import SyncPointCodec, Updates, Weights
from lightning_asgd.core.calls.shared_memory import SharedBlock, attach
from lightning_asgd.core.foundation.errors import ASGDError
from lightning_asgd.core.foundation.layout import Groups, check_form, dense, dtype_from_name
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Exchange, InitShard, Reply

log = logging.getLogger(__name__)


class Buffers:
    """What a server keeps for its workers' exchanges, by worker and fragment."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], SharedBlock] = {}
        self._mapped: dict[int, int] = {}  # by fragment, the worker whose block stays mapped
        self._codes: dict[tuple[int, int], tuple[Updates, Weights]] = {}
        self._common: dict[int, SyncPointCodec] = {}  # by fragment
        self._scratch: dict[int, tuple[Tensor, ...]] = {}  # by fragment
        self._fragments: set[int] = set()

    def open(self, message: InitShard) -> bool:
        """Prepare for a worker's exchanges of a fragment; returns whether they can pass through its shared memory."""
        key, groups = (message.worker, message.fragment), dense(message.groups)
        self._fragments.add(message.fragment)
        self._codes.pop(key, None)
        if message.compression is not None:
            downward = Weights(message.compression.downward, groups)
            self._codes[key] = Updates(message.compression, groups), downward
        if message.shared is not None:
            before = self._blocks.pop(key, None)
            if before is not None:
                before.close()
            block = attach(message.shared, groups)
            if block is not None:
                self._blocks[key] = block
                return True
        if message.compression is not None:
            self._common.setdefault(message.fragment, SyncPointCodec(groups))
        return False

    def update(self, message: Exchange, groups: Groups, *, lasting: bool) -> tuple[Tensor, ...] | None:
        """The update of ``groups``; None if there is none. If ``lasting``, no later message changes its memory."""
        key = message.worker, message.fragment
        block = self._blocks.get(key) if message.shared else None
        if block is not None:
            self._keep_mapped(*key)
            return block.tensors
        codes = self._codes.get(key)
        if message.update is None:
            return None
        if codes is None:
            check_form(message.update, groups)
            return message.update
        memory = self._scratch.get(message.fragment)
        if memory is None or lasting:
            memory = tuple(torch.empty(n, dtype=dtype_from_name(dtype)) for _, dtype, n in groups)
            self._scratch[message.fragment] = memory
        update = codes[0].decode(message.update, memory)
        check_form(update, groups)  # groups that are not coded come as they are
        return update

    def encoded(self, message: Exchange, reply: Reply) -> Reply | ASGDError:
        """A reply with weights as its worker wants them. An error for this worker if it fails: others get theirs."""
        key = message.worker, message.fragment
        held, codes = message.common, self._codes.get(key)
        common = None if held is None else self._common.get(message.fragment)
        try:
            if key in self._blocks:
                if common is not None and message.shared:
                    self._write(common, self._blocks[key])
                if self._mapped.get(message.fragment) != message.worker:
                    self._blocks[key].unmap()  # its answer had to wait
            if reply.weights is None:
                return reply
            if common is not None and held is not None:
                if codes is not None:
                    codes[1].hold(common.take(reply.weights))
                return replace(reply, weights=common.encode(reply.weights, held))
            if codes is None:
                return reply
            # A repeated message gets all: its first reply may not have arrived.
            full = message.full or reply.verdict is Verdict.REPEATED
            weights = tuple(w.clone() for w in reply.weights) if full else reply.weights  # not the scratch memory
            return replace(reply, weights=codes[1].encode(weights, full=full))
        except ASGDError as error:
            return error
        except Exception as error:
            log.exception("The reply to an exchange of worker %d failed.", message.worker)
            return ASGDError(f"A server failed on its reply to worker {message.worker}: {error!r}. This is a bug.")

    def forget_common(self, fragment: int) -> None:
        """Send the next common weights whole: they were set, and a coded difference would round them."""
        if fragment in self._common:
            self._common[fragment].values = None

    def forget(self, worker: int) -> None:
        """Release what is kept for a worker."""
        for fragment in self._fragments:
            block = self._blocks.pop((worker, fragment), None)
            if block is not None:
                block.close()
            self._codes.pop((worker, fragment), None)

    def clear(self) -> None:
        """Release everything."""
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
        self._mapped.clear()
        self._codes.clear()
        self._common.clear()
        self._scratch.clear()

    def _write(self, common: SyncPointCodec, block: SharedBlock) -> None:
        """Give a worker on this machine what those get whose weights are compressed."""
        for tensor, value, coded in zip(block.tensors, common.take(block.tensors), common.coded, strict=True):
            if coded:
                tensor.copy_(value)

    def _keep_mapped(self, worker: int, fragment: int) -> None:
        """Leave only the block in use mapped: else a server would seem to use the memory of all its workers."""
        before = self._mapped.get(fragment)
        if before is not None and before != worker and (before, fragment) in self._blocks:
            self._blocks[before, fragment].unmap()
        self._mapped[fragment] = worker
