"""How a worker shares its gradients layer by layer.

A loop of the program's own, which gives its optimizers no closures, calls backward itself, perhaps several times in a
step, and may read gradients before the step. Without a delay, means are in their places at the end of each backward, as
DDP's are. Of several backwards that are accumulated each adds its mean. With a delay, gradients are sent and replaced
when the optimizer steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from lightning_asgd.algorithms.layerwise import LayerWise
from lightning_asgd.core.calls.shared_memory import host_identity
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.module_state import average, make_identical
from lightning_asgd.core.worker.setup import Entry, trainable_parameters
from lightning_asgd.layerwise.layer_gradients import LayerGradients, _Step


class ProgramGradients(LayerGradients):
    """The same for a program that calls :meth:`before_step` before each step of its optimizers, which exist.

    All workers call backward equally often between two sync points.
    """

    _may_have_no_step = True

    def __init__(self, *about: Any, **options: Any) -> None:
        super().__init__(*about, **options)
        self._averaged = False  # whether a backward has averaged gradients since the latest step
        self._accumulates = False
        self._given: Sequence[Any] = self._training.optimizers()
        self._planned = 0  # parameters that they had when the bundles were made
        self._plan(self._given[0])

    def _plan(self, optimizer: Any) -> None:
        self._planned = self._count_parameters()
        super()._plan(optimizer)

    def _present_step(self) -> _Step | None:
        if self._now is None and not self._delay and not self._accumulates:
            self._now = self._begin_backward()
        return self._now

    def _count_parameters(self) -> int:
        return sum(len(group["params"]) for each in self._given for group in each.param_groups)

    def _plan_again(self, optimizer: Any) -> None:
        """Optimizers have got more parameters."""
        if any(self._in_flight.values()):
            raise ConfigurationError(
                f"Parameters were added to {type(optimizer).__name__} between two sync points while gradients are in "
                "flight. Expected add_param_group() after sync(), before the next step."
            )
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._plan(optimizer)
        self._averaged = False

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Send nothing within it: the backward after it sends the sums."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """A hook of a program's optimizers: replace their gradients, unless a backward has done so."""
        if self._planned != self._count_parameters():
            self._plan_again(optimizer)
        if not self._delay:
            if self._now is not None:
                raise ASGDError(
                    "An optimizer stepped during a backward pass, or after one that raised an exception. Expected "
                    "the step after backward(), and the program to end with the exception: with LayerWise, other "
                    "workers wait for all gradients of that pass."
                )
            averaged, self._averaged = self._averaged, False
            if not averaged and not _closure_of(args, kwargs):  # gradients of torch.autograd.grad, for instance
                mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
                self._average(_Step(optimizer, [b for b in self._bundles if id(b.parameters[0]) in mine]))
            return None
        closure = _closure_of(args, kwargs)
        wrapped = self.wrap(optimizer, closure or (lambda: None))
        if closure is not None:
            return (optimizer, wrapped), {}
        wrapped()
        return None

    def _average(self, step: _Step) -> None:
        """Put the means into the parameters at the end of a backward; what no worker has a gradient of keeps none."""
        for bundle in step.bundles:
            if bundle.number not in step.futures:
                self._send(step, bundle)
        self._step += 1
        for bundle in step.bundles:
            for index in bundle.layers:
                self._put(index, step.futures[bundle.number], keeps_none=True)

    def _begin_backward(self) -> _Step:
        """The first gradient of a backward exists."""
        step = _Step(None, self._bundles)
        for bundle in step.bundles:
            bundle.ready.clear()

        def end() -> None:
            self._average(step)
            self._now, self._averaged = None, True

        torch.autograd.Variable._execution_engine.queue_callback(end)
        return step


def _closure_of(args: Any, kwargs: Any) -> Any:
    """The closure that a step hook's optimizer was given, or None."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def connect(entry: Entry) -> LayerGradients:
    """The gradients of a worker's layers; in a plain loop the program calls backward itself."""
    module, collectives = entry.module, entry.collectives
    training = entry.training
    make_identical(collectives, module, trainable_parameters(module))
    kind = LayerGradients if training.closures else ProgramGradients
    tied = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.named_parameters()))
    return kind(
        entry.connection,
        entry.layout,
        module,
        cast(LayerWise, entry.algorithm),
        replace(training, late_steps=False) if tied else training,
        lambda: average(collectives, trainable_parameters(module)),
        one_machine=_on_one_machine(collectives),
    )


def _on_one_machine(collectives: Collectives) -> bool:
    host = host_identity()
    return bool(collectives.reduced("all_reduce", "the workers' machines", host, "same").value) and host != ""
