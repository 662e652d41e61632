"""Keeps training stable with gradients that arrive a fixed number of steps late."""

from __future__ import annotations

from typing import Any

import torch

from lightning_asgd.algorithms import LayerWise


class LateSteps:
    """Lowers learning rates for the duration of a step, and compensates SGD's momentum; see :class:`LayerWise`."""

    def __init__(self, algorithm: LayerWise) -> None:
        self._algorithm = algorithm
        self._known: dict[int, tuple[Any, Any]] = {}  # optimizers and their hooks
        # By optimizer: its groups, and their rates before and now.
        self._lowered: dict[int, list[tuple[dict[str, Any], Any, Any]]] = {}

    def prepare(self, optimizer: Any) -> None:
        """Called just before an optimizer's step, at the end of its closure."""
        if not self._algorithm.late or id(optimizer) in self._lowered:
            return
        if id(optimizer) not in self._known:
            self._known[id(optimizer)] = optimizer, optimizer.register_step_post_hook(self._after_step)
        self._lowered[id(optimizer)] = []
        for group in optimizer.param_groups:
            rate = group["lr"]
            group.update(self.lowered(group))
            self._lowered[id(optimizer)].append((group, rate, group["lr"]))

    def lowered(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings with the learning rate for a late gradient."""
        if not self._algorithm.late:
            return settings
        return {**settings, "lr": settings["lr"] * self._algorithm.lr_factor}  # where it is a tensor, a new one

    def restore(self) -> None:
        """Bring learning rates back whose step did not end."""
        for key in list(self._lowered):
            self._bring_back(key)

    def close(self) -> None:
        """Remove what the optimizers were given."""
        self.restore()
        for _, handle in self._known.values():
            handle.remove()
        self._known.clear()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                self._compensate(optimizer, group)
        self._bring_back(id(optimizer))

    def _bring_back(self, key: int) -> None:
        for group, rate, lowered in self._lowered.pop(key, ()):
            if group["lr"] is lowered:  # else a hook has set another one meanwhile
                group["lr"] = rate

    @torch.no_grad()
    def _compensate(self, optimizer: Any, group: dict[str, Any]) -> None:
        """Replace the step along SGD's momentum by ``a`` times the momentum and ``b`` times the gradient."""
        if not group["momentum"] or group["nesterov"]:  # Nesterov's has a = momentum and b = 1 of its own
            return
        a, b = self._algorithm.compensation(group["momentum"])
        b *= 1 - group["dampening"]
        for parameter in group["params"]:
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if parameter.grad is not None and buffer is not None:
                gradient = (-1 if group["maximize"] else 1) * parameter.grad + group["weight_decay"] * parameter
                parameter.sub_((a - 1) * buffer + b * gradient, alpha=float(group["lr"]))
