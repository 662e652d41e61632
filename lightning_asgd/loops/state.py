"""Where a plain loop's training is: what a checkpoint holds of it, and where a worker that joins later continues."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# Settings of an optimizer that say how it computes on its device, not what.
_OF_THE_DEVICE = ("params", "foreach", "fused", "capturable")


@dataclass
class LoopState:
    """The epochs and passes that were trained, and what the servers kept, if training continues from a checkpoint."""

    seed: int = 0  # of the order of the samples, the same on all workers
    epoch: int = 0  # epochs that are over
    passes: int = 0  # passes over data that are over
    in_epoch: bool = False  # whether an epoch of ``epochs()`` has begun; else each pass is one
    # The part of the pass that was trained, where a checkpoint was written within one.
    data: Mapping[str, Any] = field(default_factory=dict)
    versions: list[int] | None = None  # per server, the version to continue from; None to begin with 0
    servers: Sequence[Any] = ()  # what the servers kept beside the weights; empty if it does not fit the run
    finished: list[tuple[bytes, int]] = field(default_factory=list)
    """Order and units of the passes of the present epoch that are over."""
    trained: list[tuple[bytes, int]] = field(default_factory=list)
    """The same of the epoch within which a checkpoint was written, until they are over here too."""
    _skips: bool = False  # whether the present pass was over when the checkpoint was written

    def load(self, state: Mapping[str, Any], algorithm: str, num_servers: int) -> None:
        """Continue from a checkpoint, which may be of another algorithm or number of servers."""
        self.epoch, self.passes, self.data = state["epoch"], state["passes"], state["data"]
        self.trained = [(order, units) for order, units in state["finished"]]
        versions = list(state["versions"])
        same = len(versions) == num_servers
        self.versions = versions if same else [max(versions)] * num_servers
        self.servers = state["servers"] if same and state["algorithm"] == algorithm else ()

    def follow(self, progress: Mapping[str, Any] | None, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Continue where the other workers are, whatever checkpoint this one has loaded."""
        if self.versions is not None:
            log.warning("The checkpoint's weights are not loaded: this worker joins a run that has already started.")
        self.versions, self.servers, self.data, self.trained = None, (), {}, []
        self.epoch = self.passes = 0
        if progress is None:
            return
        self.epoch, self.passes, self.data = progress["epoch"], progress["passes"], progress["data"]
        for scheduler, theirs in zip(schedulers, progress["schedulers"], strict=True):
            scheduler.load_state_dict(theirs)
        for optimizer, groups in zip(optimizers, progress["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for name, value in settings.items():
                    _set(group, name, value)

    def progress(self, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> dict[str, Any]:
        """What a worker needs that joins now; plain values and tensors on the CPU."""
        groups = [
            [{name: _plain(value) for name, value in group.items() if name not in _OF_THE_DEVICE} for group in groups]
            for groups in (optimizer.param_groups for optimizer in optimizers)
        ]
        states = [scheduler.state_dict() for scheduler in schedulers]
        about = {"epoch": self.epoch, "passes": self.passes, "data": self.data, "between_epochs": True}
        return {**about, "groups": groups, "schedulers": states}

    def done_of(self, order: bytes, units: int) -> tuple[tuple[int, int], ...]:
        """Ranges of the pass that begins that had been trained when the checkpoint was written."""
        self._skips = bool(self.trained) and self.trained[0] == (order, units)
        if self._skips:
            del self.trained[0]
            return ((0, units),)
        if self.trained:
            self.trained, self.data = [], {}  # of another program
        if (self.data.get("order"), self.data.get("units")) != (order, units):
            return ()
        return tuple((first, last) for first, last in self.data["done"])

    def present_epoch(self) -> dict[str, Any]:
        """For a checkpoint: the pass with which the present epoch began, and its passes that are over."""
        return {"passes": self.passes - len(self.finished), "finished": list(self.finished)}

    def end_pass(self, order: bytes, units: int) -> None:
        """A pass is over."""
        self.passes += 1
        if self.in_epoch:
            self.finished.append((order, units))
        if not self._skips:  # else the part of a later one may have been trained, too
            self.data = {}

    def end_epoch(self) -> None:
        """An epoch is over."""
        self.epoch += 1
        self.in_epoch = False
        self.finished.clear()


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    """Give a parameter group another worker's setting, in this one's tensor where that is one."""
    mine = group.get(name)
    if isinstance(mine, Tensor):
        with torch.no_grad():
            mine.fill_(value)
    else:
        group[name] = value.item() if isinstance(value, Tensor) else value
