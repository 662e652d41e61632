"""Layer-wise gradients: sent during backward, used ``delay`` steps later, awaited when the layer is next needed.

Small layers that are next to each other leave in one message, a bundle, once all of them have their gradients. Over a
network a large bundle leaves in several pieces, so that the means of some arrive while others still leave.

If no code reads gradients between backward and the optimizer's step, a layer's mean gradient is awaited just before the
layer's next forward instead of in the step. The optimizer then steps this layer alone, with the learning rate and other
settings of that moment. The bits are the same: torch's optimizers skip parameters without a gradient, and treat each
parameter by itself.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Module, Parameter

from lightning_asgd.algorithms import LayerWise
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.synchronizer import Skipped, Synchronizer, Training, Waits
from lightning_asgd.layerwise.messages import LayerGradient


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


_BUNDLE = 1 << 18  # bytes from which a bundle is full: 20 ms at 100 Mbit/s, and some hundred times a message's cost
_PIECE = 1 << 19  # bytes of a message over a network at most


@dataclass
class Layer:
    """Trainable parameters of a submodule's own: of one type, and of the same optimizers."""

    owner: Module
    parameters: list[Parameter]
    optimizers: tuple[int, ...]  # numbers


@dataclass(eq=False)
class _Bundle:
    """Layers that are next to each other and alike, whose gradients travel together."""

    number: int  # of its first piece, the same on all workers
    layers: list[int]
    parameters: list[Parameter]
    piece_bytes: int  # of a message at most
    ready: set[int] = field(default_factory=set)  # ids of the parameters that have their gradients in this backward

    @property
    def piece(self) -> int:
        """Elements of a piece."""
        return max(1, self.piece_bytes // self.parameters[0].element_size())

    @property
    def pieces(self) -> int:
        """How many there are."""
        return -(-sum(p.numel() for p in self.parameters) // self.piece)

    def part(self, layer: Layer, mean: Tensor) -> Tensor:
        """A layer's values among those of the bundle, which has them in the order of its parameters."""
        first = next(i for i, p in enumerate(self.parameters) if p is layer.parameters[0])
        offset = sum(p.numel() for p in self.parameters[:first])
        return mean[offset : offset + sum(p.numel() for p in layer.parameters)]


@dataclass
class _Step:
    """The gradients of one step that are in flight."""

    optimizer: Any
    bundles: list[_Bundle]  # of the optimizer
    futures: dict[int, list[Future[Any]]] = field(default_factory=dict)  # of the pieces, by the bundles' numbers


@dataclass
class _Late:
    """A layer's postponed step."""

    optimizer: Any
    futures: list[Future[Any]]
    settings: list[dict[str, Any]]


class LayerGradients(Synchronizer):
    """Puts the mean of all workers' gradients in place of this worker's, layer by layer, ``delay`` steps later.

    All workers call ``agree`` together, which gives them the same weights and buffers. ``one_machine`` says whether all
    of them are on this machine, where pieces gain nothing.
    """

    versions: Sequence[int] = ()
    moved = False
    _may_have_no_step = False  # between two sync points, where other workers have some

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        module: Module,
        algorithm: LayerWise,
        training: Training,
        agree: Callable[[], object],
        *,
        one_machine: bool = False,
    ) -> None:
        self.layout = layout
        self.stats = ExchangeStats()
        self.versions = [0 for _ in connection.servers]
        self._connection = connection
        self._module, self._training = module, training
        self._layers: list[Layer] = []  # once an optimizer steps
        self._bundles: list[_Bundle] = []
        self._bundle_of: dict[int, _Bundle] = {}  # by the layer's number
        self._piece_bytes = sys.maxsize if one_machine else _PIECE
        self._delay = algorithm.delay
        self._late_steps = LateSteps(algorithm)
        self._agree = agree
        self._phase = 0
        self._step = 0
        self._in_flight: dict[int, deque[_Step]] = {}  # by optimizer
        self._now: _Step | None = None  # the step whose backward runs
        self._late: dict[int, _Late] = {}  # by layer
        # Layers whose forward runs in every step; a layer whose weights other modules use must not be late.
        self._called: set[int] | None = None if training.late_steps else set()
        self._forwards: set[int] = set()
        self._handles: list[Any] = []

    def wrap(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Send gradients while the closure's backward makes them; the optimizer gets those of ``delay`` steps ago."""
        if not self._bundles:
            self._plan(optimizer)
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        bundles = [bundle for bundle in self._bundles if id(bundle.parameters[0]) in mine]

        def exchanged() -> Any:
            self._now = step = _Step(optimizer, bundles)
            for bundle in bundles:
                bundle.ready.clear()
            output = closure()
            self._now = None
            self._look_at_forwards()
            for bundle in bundles:
                if bundle.number not in step.futures:
                    self._send(step, bundle)  # without gradient, or made outside the closure
            waiting = self._in_flight.setdefault(id(optimizer), deque())
            waiting.append(step)
            self._step += 1
            due = waiting.popleft() if len(waiting) > self._delay else _Step(optimizer, bundles)
            # torch's own optimizers treat every parameter by itself, except LBFGS. Others may not.
            by_parameter = type(optimizer).__module__.startswith("torch.optim.")
            self._use(due, may_be_late=by_parameter and not isinstance(optimizer, torch.optim.LBFGS))
            self._late_steps.prepare(optimizer)
            return output

        return exchanged

    def _plan(self, optimizer: Any) -> None:
        """Make the bundles, now that the optimizers exist."""
        exchanged = {spec.name for spec in self.layout.tensors}
        self._layers = layers_of(self._module, exchanged, self._training.optimizers() or [optimizer])
        self._bundles = _bundled(self._layers, self._piece_bytes)
        self._bundle_of = {layer: bundle for bundle in self._bundles for layer in bundle.layers}
        for index, layer in enumerate(self._layers):
            for parameter in layer.parameters:
                hook = self._hook(self._bundle_of[index])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
            if self._called is None:
                self._handles.append(layer.owner.register_forward_pre_hook(self._before_forward(index)))

    def count_step(self, skipped: Skipped = False) -> None:
        """See :class:`Synchronizer`."""
        self.moved = True
        self.stats.steps += 1

    def flush(self) -> Waits:
        """Apply the gradients still in flight, and end this worker's phase, so that no other worker waits for it."""
        self._take_all_late()
        for step in [step for waiting in self._in_flight.values() for step in waiting]:
            self._use(step, keeps_none=False)
            self._late_steps.prepare(step.optimizer)
            step.optimizer.step()
            step.optimizer.zero_grad()
        self._in_flight.clear()
        if self.moved or self._may_have_no_step:
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
        self._late_steps.restore()
        return {}

    def close(self) -> None:
        """See :class:`Synchronizer`."""
        self._in_flight.clear()
        self._late.clear()
        self._late_steps.close()
        for handle in self._handles:
            handle.remove()

    def _present_step(self) -> _Step | None:
        """The step whose backward runs; None if its gradients are not sent now."""
        return self._now

    def _hook(self, bundle: _Bundle) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            step = self._present_step()
            if step is None or bundle not in step.bundles or bundle.number in step.futures:
                return  # accumulated over several batches, of which this is not the last; or of another optimizer
            bundle.ready.add(id(parameter))
            if len(bundle.ready) == len(bundle.parameters):
                self._send(step, bundle)

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
        while self._late:  # a bundle's layers are taken together
            self._take_late(next(iter(self._late)))

    def _take_late(self, index: int) -> None:
        """Take the optimizer's step for one layer, and for those of its bundle."""
        late = self._late[index]
        groups = late.optimizer.param_groups
        now = [_settings(group) for group in groups]
        gradients = [(p, p.grad) for group in groups for p in group["params"]]
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            for group, settings in zip(groups, late.settings, strict=True):
                group.update(self._late_steps.lowered(settings))
            for layer in self._bundle_of[index].layers:
                if self._late.pop(layer, None) is not None:
                    self._put(layer, late.futures)
            late.optimizer.step()
        finally:
            for group, settings in zip(groups, now, strict=True):
                group.update(settings)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    # ------------------------------------------------------------------ one bundle's gradient

    def _send(self, step: _Step, bundle: _Bundle) -> None:
        parts = []
        for parameter in bundle.parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append((gradient.to_dense() if gradient.is_sparse else gradient).detach().reshape(-1))
        flat = torch.cat(parts).cpu()
        pieces = enumerate(torch.split(flat, bundle.piece), start=bundle.number)
        step.futures[bundle.number] = [self._post(self._server(n), self._step, n, piece) for n, piece in pieces]
        self.stats.bytes_pushed += flat.nbytes
        self.stats.bytes_fetched += flat.nbytes

    def _server(self, piece: int) -> int:
        return piece % len(self._connection.servers)

    def _post(self, server: int, step: int, piece: int, gradient: Tensor | None) -> Future[Any]:
        message = LayerGradient(*self._connection.sender, self._phase, step, piece, gradient)
        return self._connection.post(server, message)

    def _use(self, step: _Step, *, may_be_late: bool = False, keeps_none: bool = True) -> None:
        """Put a step's mean gradients into the parameters, now or later; layers that took no part are left out."""
        settings = [_settings(group) for group in step.optimizer.param_groups]
        for bundle in step.bundles:
            futures = step.futures.get(bundle.number)
            for index in bundle.layers:
                if futures is not None and not (may_be_late and index in (self._called or ())):
                    self._put(index, futures, keeps_none=keeps_none)
                    continue
                if futures is not None:
                    self._late[index] = _Late(step.optimizer, futures, settings)
                for parameter in self._layers[index].parameters:
                    parameter.grad = None

    def _put(self, index: int, futures: list[Future[Any]], *, keeps_none: bool = False) -> None:
        """Put a layer's part of its bundle's mean gradient into its parameters; ``keeps_none``: no zeros for None."""
        bundle, offset = self._bundle_of[index], 0
        pieces = enumerate(futures, start=bundle.number)
        means = [self._connection.result(self._server(number), future) for number, future in pieces]
        mean = bundle.part(self._layers[index], means[0] if len(means) == 1 else torch.cat(means))
        for parameter in self._layers[index].parameters:
            values = mean[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
            if keeps_none and parameter.grad is None and not values.any():
                continue
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(values)


def _bundled(layers: Sequence[Layer], piece_bytes: int) -> list[_Bundle]:
    """From the end, where backward begins, so that the first layers, which are needed first, wait for few others."""
    made: list[_Bundle] = []
    size, last_kind = 0, None
    for index, layer in reversed([*enumerate(layers)]):
        first = layer.parameters[0]
        kind = first.dtype, first.device, layer.optimizers
        if size >= _BUNDLE or kind != last_kind:
            made.append(_Bundle(made[-1].number + made[-1].pieces if made else 0, [], [], piece_bytes))
            size, last_kind = 0, kind
        made[-1].layers.append(index)
        made[-1].parameters += layer.parameters
        size += sum(p.nbytes for p in layer.parameters)
    return made


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A copy: schedulers change a learning rate that is a tensor in place."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def layers_of(module: Module, names: Collection[str], optimizers: Sequence[Any]) -> list[Layer]:
    """The submodules that own parameters among ``names``, in the module's order. Those that no optimizer has are left.

    A parameter is the first one's that has it. Parameters of several types or optimizers are layers of their own.
    """
    owned = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    layers: dict[Any, Layer] = {}
    for name, parameter in module.named_parameters():
        of = tuple(number for number, theirs in enumerate(owned) if id(parameter) in theirs)
        if name in names and parameter.requires_grad and of:
            owner = name.rpartition(".")[0]
            layer = layers.setdefault((owner, parameter.dtype, of), Layer(module.get_submodule(owner), [], of))
            layer.parameters.append(parameter)
    return list(layers.values())
