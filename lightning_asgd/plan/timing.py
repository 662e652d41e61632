"""How long a LightningModule's optimizer step takes, without a Trainer."""

from __future__ import annotations

import statistics
import time
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.class_trees import tree_of
from lightning_asgd.core.lightning.private_names import to_device

__all__ = ["TrainingStep", "seconds_per_step"]


class TrainingStep:
    """A module's ``training_step``, backward pass and optimizer step. It changes the module's weights.

    Args:
        module: a LightningModule with automatic optimization. It is put on the device, in training mode.
        device: None for the machine's accelerator, or for the CPU if there is none.

    Raises:
        ConfigurationError: this is no LightningModule; or it optimizes by hand, which needs a Trainer.
    """

    def __init__(self, module: Any, device: torch.device | None = None) -> None:
        try:
            tree = tree_of(module)
        except TypeError as error:
            raise ConfigurationError(f"Cannot time {type(module).__name__}. Expected a LightningModule.") from error
        optimizers = tree.configure_optimizers(module.configure_optimizers() or [])[0]
        if not module.automatic_optimization or len(optimizers) != 1:
            raise ConfigurationError(
                f"{type(module).__name__} has {len(optimizers)} optimizers and automatic_optimization="
                f"{module.automatic_optimization}. Expected one optimizer, and automatic optimization: without a "
                "Trainer nothing else can be timed."
            )
        # torch 2.6 raises where it is asked for the accelerator of a machine that has none.
        available = torch.accelerator.is_available()
        self.device = device or (torch.accelerator.current_accelerator() if available else None) or torch.device("cpu")
        self._module = module.to(self.device).train()
        self._optimizer = optimizers[0]
        kinds = [each.kind for each in signature(module.training_step).parameters.values()]
        self._numbered = Parameter.VAR_POSITIONAL in kinds or sum(k < Parameter.VAR_POSITIONAL for k in kinds) > 1

    @property
    def module(self) -> Any:
        """The module, on the device."""
        return self._module

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and buffers, and of gradients and the optimizer's state as far as these exist by now."""
        parameters = [*self._module.parameters()]
        state = [v for values in self._optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        return sum(tensor.nbytes for tensor in [*parameters, *self._module.buffers(), *gradients, *state])

    def to_device(self, batch: Any) -> Any:
        """The batch where the module is, by the module's own hooks."""
        return to_device.of(self._module)(batch, self.device)

    def __call__(self, batch: Any) -> None:
        """Train a batch that is on the device, and wait until the device has.

        Raises:
            ConfigurationError: ``training_step`` returned no loss.
        """
        self._optimizer.step(lambda: self._loss(batch))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _loss(self, batch: Any) -> Tensor:
        """The loss, with its gradients computed."""
        output = self._module.training_step(batch, 0) if self._numbered else self._module.training_step(batch)
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise ConfigurationError(
                f"training_step of {type(self._module).__name__} returned {loss!r}. Expected a loss: a tensor, or a "
                "dictionary that holds one as 'loss'."
            )
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def seconds_per_step(step: TrainingStep, batch: Any, steps: int = 10, warm_up: int = 3) -> float:
    """Median seconds of a step on a batch that is on the device.

    Args:
        step: what is timed.
        batch: as the loader gives it.
        steps: how often.
        warm_up: steps before that, which are not timed.

    Returns:
        seconds.
    """
    there = step.to_device(batch)
    seconds = []
    for _ in range(warm_up + steps):
        begun = time.perf_counter()
        step(there)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[warm_up:])
