"""Layer-wise gradients: sent during backward, used ``delay`` steps later, awaited when the layer is next needed.

If no code reads gradients between backward and the optimizer's step, a layer's mean gradient is awaited just before the
layer's next forward instead of in the step. The optimizer then steps this layer alone, with the learning rate and other
settings of that moment. The bits are the same: torch's optimizers skip parameters without a gradient, and treat each
parameter by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Module, Parameter

from lightning_asgd.layout import Layout
from lightning_asgd.protocol import LayerGradient
from lightning_asgd.stats import ExchangeStats
from lightning_asgd.worker.connection import Connection
from lightning_asgd.worker.synchronizer import Synchronizer, Waits

__all__ = ["Layer", "LayerGradients", "layers_of"]


@dataclass
class Layer:
    """A submodule's own trainable parameters."""

    owner: Module
    parameters: list[Parameter]
    ready: int = 0  # of its parameters in this backward


@dataclass
class _Step:
    """The gradients of one step that are in flight."""

    optimizer: Any
    futures: dict[int, Future[Any]] = field(default_factory=dict)


@dataclass
class _Late:
    """A layer's postponed step."""

    optimizer: Any
    future: Future[Any]
    settings: list[dict[str, Any]]


class LayerGradients(Synchronizer):
    """Puts the mean of all workers' gradients in place of this worker's, layer by layer, ``delay`` steps later.

    All workers call ``agree`` together, which gives them the same weights and buffers. ``late`` says whether a layer's
    step may be taken as late as before its next forward.
    """

    versions: Sequence[int] = ()
    moved = False

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        layers: Sequence[Layer],
        delay: int,
        agree: Callable[[], object],
        *,
        late: bool = False,
    ) -> None:
        self.layout = layout
        self.stats = ExchangeStats()
        self.versions = [0 for _ in connection.servers]
        self._connection = connection
        self._layers = list(layers)
        self._delay = delay
        self._agree = agree
        self._phase = 0
        self._step = 0
        self._under_way: dict[int, deque[_Step]] = {}  # by optimizer
        self._now: _Step | None = None  # the step whose backward runs
        self._late: dict[int, _Late] = {}  # by layer
        # Layers whose forward runs in every step; a layer whose weights other modules use must not be late.
        self._called: set[int] | None = None
        self._forwards: set[int] = set()
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, layer in enumerate(self._layers)
            for parameter in layer.parameters
        ]
        if late:
            for index, layer in enumerate(self._layers):
                self._handles.append(layer.owner.register_forward_pre_hook(self._before_forward(index)))
        else:
            self._called = set()

    def wrap(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Send gradients while the closure's backward makes them; the optimizer gets those of ``delay`` steps ago."""

        def exchanged() -> Any:
            self._now = step = _Step(optimizer)
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for layer in self._layers:
                layer.ready = 0
            output = closure()
            self._now = None
            self._look_at_forwards()
            for index, layer in enumerate(self._layers):
                if index not in step.futures and id(layer.parameters[0]) in mine:
                    self._send(step, index)  # without gradient, or made outside the closure
            waiting = self._under_way.setdefault(id(optimizer), deque())
            waiting.append(step)
            self._step += 1
            due = waiting.popleft() if len(waiting) > self._delay else _Step(optimizer)
            self._use(due, mine, may_be_late=_by_parameter(optimizer))
            return output

        return exchanged

    def count_step(self) -> None:
        """See :class:`Synchronizer`."""
        self.moved = True
        self.stats.steps += 1

    def flush(self) -> Waits:
        """Apply the gradients still in flight, and end this worker's phase, so that no other worker waits for it."""
        self._take_all_late()
        for step in [step for waiting in self._under_way.values() for step in waiting]:
            parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
            self._use(step, {id(p) for p in parameters})
            step.optimizer.step()
            step.optimizer.zero_grad()
        self._under_way.clear()
        if self.moved:
            for server in self._connection.servers:
                self._connection.result(server, self._post(server, 0, -1, None))
        self._phase += 1
        self._step = 0
        return ()

    def fetch(self, *, park: bool = False) -> Waits:
        """See :class:`Synchronizer`. Weights differ only where a worker took fewer steps; buffers are averaged."""
        self.moved = False
        self._agree()
        return ()

    def peek(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`: only the module holds the weights; this takes the postponed steps."""
        return self.catch_up()

    def catch_up(self) -> dict[str, Tensor]:
        """See :class:`Synchronizer`."""
        self._take_all_late()
        return {}

    def close(self) -> None:
        """See :class:`Synchronizer`."""
        self._under_way.clear()
        self._late.clear()
        for handle in self._handles:
            handle.remove()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        layer = self._layers[index]

        def arrived(_: Tensor) -> None:
            if self._now is None:
                return  # accumulated over several batches, of which this is not the last
            layer.ready += 1
            if layer.ready == len(layer.parameters):
                self._send(self._now, index)

        return arrived

    # ------------------------------------------------------------------ postponed steps

    def _before_forward(self, index: int) -> Callable[[Module, Any], None]:
        def needed(_: Module, __: Any) -> None:
            self._forwards.add(index)
            if index in self._late:
                self._take_late(index)

        return needed

    def _look_at_forwards(self) -> None:
        """After a step's forward and backward: which layers may be late from now on."""
        self._called = set(self._forwards) if self._called is None else self._called & self._forwards
        self._forwards.clear()
        self._take_all_late()

    def _take_all_late(self) -> None:
        for index in list(self._late):
            self._take_late(index)

    def _take_late(self, index: int) -> None:
        """Take the optimizer's step for one layer."""
        late = self._late.pop(index)
        groups = late.optimizer.param_groups
        now = [_settings(group) for group in groups]
        gradients = [(p, p.grad) for group in groups for p in group["params"]]
        for parameter, _ in gradients:
            parameter.grad = None
        for group, settings in zip(groups, late.settings, strict=True):
            group.update(settings)
        self._put(index, late.future)
        late.optimizer.step()
        for group, settings in zip(groups, now, strict=True):
            group.update(settings)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    # ------------------------------------------------------------------ one layer's gradient

    def _send(self, step: _Step, index: int) -> None:
        parts = []
        for parameter in self._layers[index].parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append((gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1))
        flat = torch.cat(parts).cpu()
        step.futures[index] = self._post(self._server(index), self._step, index, flat)
        self.stats.bytes_pushed += flat.nbytes
        self.stats.bytes_fetched += flat.nbytes

    def _server(self, index: int) -> int:
        return index % len(self._connection.servers)

    def _post(self, server: int, step: int, index: int, gradient: Tensor | None) -> Future[Any]:
        message = LayerGradient(*self._connection.sender, self._phase, step, index, gradient)
        return self._connection.post(server, message)

    def _use(self, step: _Step, mine: set[int], *, may_be_late: bool = False) -> None:
        """Put a step's mean gradients into the parameters, now or later; layers that took no part are left out."""
        for index, layer in enumerate(self._layers):
            if index not in step.futures:
                for parameter in layer.parameters:
                    if id(parameter) in mine:
                        parameter.grad = None
                continue
            if self._called is not None and index in self._called and id(layer.parameters[0]) in mine and may_be_late:
                settings = [_settings(group) for group in step.optimizer.param_groups]
                self._late[index] = _Late(step.optimizer, step.futures[index], settings)
                for parameter in layer.parameters:
                    parameter.grad = None
            else:
                self._put(index, step.futures[index])

    def _put(self, index: int, future: Future[Any]) -> None:
        """Wait for a layer's mean gradient, and put it into the parameters."""
        mean = self._connection.result(self._server(index), future)
        offset = 0
        for parameter in self._layers[index].parameters:
            values = mean[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(values)


def _by_parameter(optimizer: Any) -> bool:
    """Whether an optimizer treats every parameter by itself, as far as is known."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def layers_of(module: Module, names: set[str]) -> list[Layer]:
    """The submodules that own parameters among ``names``, in the module's order.

    A parameter is the first one's that has it.
    """
    layers: dict[tuple[str, torch.dtype], Layer] = {}
    for name, parameter in module.named_parameters():
        if name in names and parameter.requires_grad:
            owner = name.rpartition(".")[0]
            layer = layers.setdefault((owner, parameter.dtype), Layer(module.get_submodule(owner), []))
            layer.parameters.append(parameter)
    return list(layers.values())
