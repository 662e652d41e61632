"""What a program changes otherwise than by optimizer steps: frozen parameters, counters, and modules of callbacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.adapter.class_trees import rank_zero_warn
from lightning_asgd.layout import FLAGS, Layout
from lightning_asgd.worker.collectives import Collectives, Phase
from lightning_asgd.worker.worker_setup import digest_of, make_identical, named_state

__all__ = ["OwnState", "share_callback_modules"]

_LOOKED_AT = 16  # values of a frozen parameter
_COUNTERS = torch.int64, torch.int32, torch.int16, torch.int8
_NOTE = "flags"  # what they are published as
_RESET = "num_batches_tracked"  # a counter that StochasticWeightAveraging sets back


class OwnState:
    """A module's frozen parameters, flags and integer buffers, as they were when a sync point was passed.

    Args:
        module: the module.
        layout: gives what is exchanged at present.
        collectives: gives those with the other workers, which are not real in an elastic run.
    """

    def __init__(self, module: Module, layout: Callable[[], Layout], collectives: Callable[[], Collectives]) -> None:
        self._module, self._layout, self._collectives = module, layout, collectives
        self._warned = False
        self._published: tuple[str, bytes] = "", b""  # session and digest of the flags
        if collectives().phase is Phase.ENTERING:
            self._adopt_flags()
        self.note()

    def note(self) -> None:
        """A sync point has been passed."""
        self._samples = {name: _sample(parameter) for name, parameter in self._frozen().items()}
        found = {} if self._warned else self._integers()
        self._counters = {name: buffer.detach().cpu().clone() for name, buffer in found.items()}

    def check_counters(self) -> None:
        """Warn once if a buffer of integers or flags has fallen: servers keep the largest value, as for counters."""
        found = {} if self._warned else self._integers()
        for name, before in self._counters.items():
            if name in found and bool((found[name].detach().cpu() < before).any()):
                self._warned = True
                rank_zero_warn(_of_flags(name, before.dtype) if before.dtype in FLAGS else _of_counters(name))
                return

    def share(self) -> None:
        """Give all workers the chief's flags, and its frozen parameters if any were changed. All call it together."""
        flags = self._flags()
        self._publish(flags, make_identical(self._collectives(), flags))
        frozen = self._frozen()
        if not frozen:
            return
        changed = any(not torch.equal(self._samples[n], _sample(p)) for n, p in frozen.items() if n in self._samples)
        if self._collectives().decide(changed, all=False):
            make_identical(self._collectives(), frozen)

    def _publish(self, flags: Mapping[str, Tensor], digest: bytes) -> None:
        """Publish the chief's flags, if they have changed, for processes that replace lost workers."""
        collectives = self._collectives()
        client = collectives.client
        if client is None or not digest:
            return
        session = client.connection.session
        if (session, digest) != self._published and collectives.rank == collectives.chief:
            client.note(_NOTE, (session, {name: flag.detach().cpu() for name, flag in flags.items()}))
            self._published = session, digest

    def _adopt_flags(self) -> None:
        """Take the flags of the latest sync point: servers have the largest values that there ever were."""
        client, flags = self._collectives().client, self._flags()
        found = None if client is None or not flags else client.note(_NOTE)
        if client is not None and found is not None and found[0] == client.connection.session:
            with torch.no_grad():
                for name, value in found[1].items():
                    flags[name].copy_(value)

    @property
    def _exchanged(self) -> set[str]:
        return {spec.name for spec in self._layout().tensors}

    def _frozen(self) -> Mapping[str, Tensor]:
        if not self._collectives().real:
            return {}
        exchanged = self._exchanged
        return {name: p for name, p in self._module.named_parameters() if name not in exchanged}

    def _buffers(self, kinds: Collection[torch.dtype]) -> dict[str, Tensor]:
        exchanged = self._exchanged
        return {n: b for n, b in self._module.named_buffers() if n in exchanged and b.dtype in kinds}

    def _flags(self) -> Mapping[str, Tensor]:
        """Flags and masks that exchanges do not write."""
        return self._buffers(FLAGS) if self._keeps_flags else {}

    def _integers(self) -> Mapping[str, Tensor]:
        """What exchanges write the largest value into."""
        found = self._buffers(_COUNTERS if self._keeps_flags else (*_COUNTERS, *FLAGS))
        return {n: b for n, b in found.items() if not n.endswith(_RESET)}

    @property
    def _keeps_flags(self) -> bool:
        """Whether workers meet at sync points, and have flags of their own until then; see ``worker_setup``."""
        client = self._collectives().client
        return client is not None and client.connection.world_size > 0


def _of_counters(name: str) -> str:
    return (
        f"Buffer {name!r} has fallen since the last sync point. Buffers are exchanged: of integers all "
        "workers take the largest value, as for counters, and of floating-point numbers the mean. If it is "
        "a position in a queue that each worker fills by itself, register it and the queue with "
        "persistent=False. Each worker then keeps its own."
    )


def _of_flags(name: str, dtype: torch.dtype) -> str:
    return (
        f"Buffer {name!r}, a flag or mask of {dtype}, has fallen since the last sync point, and rises again with the "
        "next exchange. In an elastic run all workers take the largest value of flags and masks, so that what one "
        "worker has set stays set. Keep the opposite in it, which only rises (what is switched off or pruned); clear "
        "it again at the beginning of every training_step; or register it with persistent=False: each worker then "
        "keeps its own, and checkpoints do not hold it."
    )


def _sample(parameter: Tensor) -> Tensor:
    """A few of its values: a program that averages weights changes all of them."""
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _LOOKED_AT)].clone()


def share_callback_modules(trainer: Any, collectives: Collectives) -> None:
    """Give all workers the mean of each module that callbacks keep, such as averages of the trained weights.

    Only of those that all workers have: a network that makes pictures may be on one alone. All call it together.
    """
    found = _callback_modules(trainer)
    if not collectives.real:
        return
    tensors = {f"{key}.{name}": tensor for key in found for name, tensor in found[key].items()}
    if collectives.reduced("all_reduce", "modules of callbacks", digest_of(tensors), "same").value:
        return
    forms = {key: repr([(n, t.shape, t.dtype) for n, t in state.items()]) for key, state in found.items()}
    theirs = collectives.gather("all_gather", "modules of callbacks", forms).values()
    for key, state in found.items():
        if all(each.get(key) == forms[key] for each in theirs):
            make_identical(collectives, state, mean=True)


def _callback_modules(trainer: Any) -> dict[str, Mapping[str, Tensor]]:
    """The states of the modules, by the class of their callback and the attribute, in an order all workers have."""
    found: dict[str, Mapping[str, Tensor]] = {}
    for callback in trainer.callbacks:
        for attribute, value in vars(callback).items():
            key, number = f"{type(callback).__qualname__}.{attribute}", 0
            while f"{key}.{number}" in found:
                number += 1
            if isinstance(value, Module) and value is not trainer.lightning_module:
                found[f"{key}.{number}"] = named_state(value)
    return dict(sorted(found.items()))
