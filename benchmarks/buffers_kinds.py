"""Layers that keep buffers of every kind, and what must hold of each after a fit on several workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

__all__ = ["KINDS", "WIDTH", "Kind"]

WIDTH = 16

warnings.filterwarnings("ignore", category=FutureWarning)


@dataclass(frozen=True)
class Kind:
    """One kind of buffer: the layer that has it, and ``fault``, which says what is wrong with it after a fit."""

    make: Callable[[], nn.Module]
    fault: Callable[[Any], str] = lambda layer: ""
    same: bool = True  # whether all workers hold the same bits at the end


class Layer(nn.Module):
    """A linear layer, whose output passes through ``keep`` in training."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.keep(y.detach())
        return self.use(y)

    def keep(self, y: Tensor) -> None:
        """Change the buffers."""

    def use(self, y: Tensor) -> Tensor:
        """What the layer returns."""
        return y


def statistics(layer: Any) -> str:
    """A variance below 0, or a value that is not finite."""
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point() and not bool(torch.isfinite(buffer).all()):
            return f"{name} is not finite"
        if name.endswith("var") and bool((buffer < 0).any()):
            return f"{name} is below 0: {float(buffer.min()):.3g}"
    return ""


def norm(layer: nn.Module, **how: Any) -> nn.Module:
    """A linear layer before a normalisation."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)


class Images(nn.Module):
    """Features as images for two-dimensional layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.linear, self.layer = nn.Linear(WIDTH, WIDTH), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.linear(x).view(-1, 4, 2, 2)).flatten(1)


def lazy() -> nn.Module:
    """A lazy batch norm that has seen a batch."""
    layer = norm(nn.LazyBatchNorm1d())
    layer(torch.randn(4, WIDTH))
    return layer


class Renormalised(Layer):
    """Batch renormalisation, as other libraries have it, with a standard deviation."""

    def __init__(self) -> None:
        super().__init__(running_mean=torch.zeros(WIDTH), running_std=torch.ones(WIDTH))

    def keep(self, y: Tensor) -> None:
        self.running_mean.lerp_(y.mean(0), 0.1)
        self.running_std.lerp_(y.std(0), 0.1)

    def use(self, y: Tensor) -> Tensor:
        return (y - self.running_mean) / (self.running_std + 1e-3)


class Welford(Layer):
    """A mean from a float sum and a whole count."""

    def __init__(self) -> None:
        super().__init__(total=torch.zeros(()), count=torch.zeros((), dtype=torch.int64))

    def keep(self, y: Tensor) -> None:
        self.total += 5.0 * len(y)
        self.count += len(y)

    @staticmethod
    def fault(layer: Any) -> str:
        mean = float(layer.total / layer.count)
        return "" if abs(mean - 5) < 1e-4 else f"the mean of fives is {mean:.3f}"


def unit_norm(layer: Any) -> str:
    """A singular vector of spectral norm that has another length than 1."""
    vectors = [b for n, b in layer.named_buffers() if n.rpartition(".")[2] in ("weight_u", "weight_v", "_u", "_v")]
    off = max((abs(float(vector.norm()) - 1) for vector in vectors), default=1.0)
    return "" if off < 1e-4 else f"a singular vector's length is off by {off:.3g}"


class Projection(Layer):
    """A random orthogonal projection that is drawn again now and then, as Performer's."""

    def __init__(self) -> None:
        super().__init__(projection=torch.eye(WIDTH), calls=torch.zeros((), dtype=torch.int64))

    def keep(self, y: Tensor) -> None:
        self.calls += 1
        if self.calls % 5 == 1:
            self.projection.copy_(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

    def use(self, y: Tensor) -> Tensor:
        return y @ self.projection

    @staticmethod
    def fault(layer: Any) -> str:
        off = float((layer.projection @ layer.projection.T - torch.eye(WIDTH)).abs().max())
        return "" if off < 1e-4 else f"the projection is not orthogonal, by {off:.3g}"


class Observed(nn.Module):
    """An observer or fake quantisation of torch.ao behind a linear layer."""

    def __init__(self, observer: nn.Module) -> None:
        super().__init__()
        self.linear, self.observer = nn.Linear(WIDTH, WIDTH), observer

    def forward(self, x: Tensor) -> Tensor:
        return self.observer(self.linear(x))


def observer(name: str) -> nn.Module:
    """A layer with one of torch's observers."""
    from torch.ao import quantization

    return Observed(getattr(quantization, name)())


def fake_quantisation(*, per_channel: bool) -> nn.Module:
    """A layer with fake quantisation, whose scale may get the shape of the channels."""
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

    if not per_channel:
        return Observed(FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255))
    how = {"ch_axis": 1, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "quant_min": -128}
    return Observed(FakeQuantize(MovingAveragePerChannelMinMaxObserver, quant_max=127, **how))


class Teacher(Layer):
    """An exponential average of the layer, as a frozen module beside it and as buffers."""

    def __init__(self) -> None:
        super().__init__(shadow=torch.zeros(WIDTH, WIDTH), updates=torch.zeros((), dtype=torch.int64))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def keep(self, y: Tensor) -> None:
        self.updates += 1
        self.shadow.lerp_(self.linear.weight, 0.1)
        self.teacher.weight.lerp_(self.linear.weight, 0.1)


class Codebook(Layer):
    """A codebook that follows its inputs, with the sizes of its clusters."""

    def __init__(self) -> None:
        super().__init__(codes=torch.randn(8, WIDTH), sums=torch.zeros(8, WIDTH), sizes=torch.ones(8))

    def keep(self, y: Tensor) -> None:
        hits = nn.functional.one_hot(torch.cdist(y, self.codes).argmin(1), 8).float()
        self.sizes.lerp_(hits.sum(0), 0.1)
        self.sums.lerp_(hits.T @ y, 0.1)
        self.codes.copy_(self.sums / self.sizes.clamp(min=1e-3)[:, None])

    @staticmethod
    def fault(layer: Any) -> str:
        off = float((layer.codes - layer.sums / layer.sizes.clamp(min=1e-3)[:, None]).abs().max())
        return "" if off < 1e-4 else f"codes are off their clusters' means by {off:.3g}"


class Queue(Layer):
    """A queue that is written in turn, with a pointer."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(64, WIDTH), persistent=persistent)
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64), persistent=persistent)

    def keep(self, y: Tensor) -> None:
        at = int(self.pointer)
        rows = (torch.arange(len(y)) + at) % 64
        self.queue[rows] = nn.functional.normalize(y, dim=1)
        self.pointer[0] = (at + len(y)) % 64

    @staticmethod
    def fault(layer: Any) -> str:
        lengths = layer.queue.norm(dim=1)
        off = float(torch.minimum(lengths, (lengths - 1).abs()).max())
        return "" if off < 1e-4 else f"an entry's length is {float(lengths[(lengths - 1).abs().argmax()]):.3f}"


class Bank(Layer):
    """A bank of features that grows with every batch."""

    def __init__(self) -> None:
        super().__init__(bank=torch.zeros(0, WIDTH))

    def keep(self, y: Tensor) -> None:
        self.bank = torch.cat([self.bank, y[:1]])[-200:]


class Cache(Layer):
    """Positions for the longest sequence that this worker has seen."""

    def __init__(self) -> None:
        super().__init__(positions=torch.arange(1.0))

    def keep(self, y: Tensor) -> None:
        length = 1 + int(torch.randint(1, 40, ()))
        if length > len(self.positions):
            self.positions = torch.arange(float(length))

    @staticmethod
    def fault(layer: Any) -> str:
        return "" if torch.equal(layer.positions, torch.arange(float(len(layer.positions)))) else "positions are mixed"


class Late(Layer):
    """A buffer that a worker makes when it first sees a large value; it may never."""

    def keep(self, y: Tensor) -> None:
        if not hasattr(self, "first") and float(y[0, 0]) > 0.5:
            self.register_buffer("first", y[0].clone())


class Mask(Layer):
    """A causal mask that the first batch fills with -inf."""

    def __init__(self) -> None:
        super().__init__(mask=torch.zeros(WIDTH, WIDTH))

    def keep(self, y: Tensor) -> None:
        self.mask.copy_(torch.full((WIDTH, WIDTH), float("-inf")).triu(1))

    def use(self, y: Tensor) -> Tensor:
        return torch.softmax(self.mask[len(self.mask) - 1] + y, -1) + y


class Flags(Layer):
    """A mask that is pruned, and a flag that is lowered."""

    def __init__(self) -> None:
        super().__init__(mask=torch.ones(WIDTH, dtype=torch.bool), warm=torch.ones((), dtype=torch.uint8))

    def keep(self, y: Tensor) -> None:
        self.mask[-4:] = False
        self.warm.zero_()

    def use(self, y: Tensor) -> Tensor:
        return y * self.mask

    @staticmethod
    def fault(layer: Any) -> str:
        return "" if int(layer.mask.sum()) == WIDTH - 4 and not layer.warm else "what was lowered has risen"


class Values(Layer):
    """One buffer with values of some kind, which every batch changes."""

    def __init__(self, value: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(value=value)
        self._change = change

    def keep(self, y: Tensor) -> None:
        self.value = self._change(self.value, y)


def values(value: Tensor, change: Callable[[Tensor, Tensor], Tensor] = lambda value, y: value + 1) -> Kind:
    """A kind of :class:`Values`."""
    return Kind(lambda: Values(value.clone(), change))


class Random(Layer):
    """The state of a generator of the layer's own."""

    def __init__(self) -> None:
        super().__init__(state=torch.Generator().manual_seed(0).get_state())

    def keep(self, y: Tensor) -> None:
        generator = torch.Generator()
        generator.set_state(self.state)
        y.add_(torch.randn(y.shape, generator=generator) * 0.01)
        self.state = generator.get_state()

    @staticmethod
    def fault(layer: Any) -> str:
        torch.Generator().set_state(layer.state)  # raises if it is none
        return ""


def frozen_norm() -> nn.Module:
    """torchvision's batch norm of constants."""
    from torchvision.ops import FrozenBatchNorm2d

    return Images(FrozenBatchNorm2d(4))


def large_sums(value: Tensor, y: Tensor) -> Tensor:
    """Sums of squares that exceed what an update may hold."""
    return value + 1e11 * y.square().sum(0)


KINDS: dict[str, Kind] = {
    "batch norm, momentum 0.1": Kind(lambda: norm(nn.BatchNorm1d(WIDTH)), statistics),
    "batch norm, momentum 1.0": Kind(lambda: norm(nn.BatchNorm1d(WIDTH, momentum=1.0)), statistics),
    "batch norm, momentum None": Kind(lambda: norm(nn.BatchNorm1d(WIDTH, momentum=None)), statistics),
    "batch norm in 2 dimensions, not affine": Kind(lambda: Images(nn.BatchNorm2d(4, affine=False)), statistics),
    "lazy batch norm": Kind(lazy, statistics),
    "instance norm with statistics": Kind(lambda: Images(nn.InstanceNorm2d(4, track_running_stats=True)), statistics),
    "frozen batch norm (torchvision)": Kind(frozen_norm, statistics),
    "batch renormalisation": Kind(Renormalised, statistics),
    "a float sum and a whole count": Kind(Welford, Welford.fault),
    "spectral norm": Kind(lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), unit_norm),
    "spectral norm, a parametrization": Kind(
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), unit_norm
    ),
    "weight norm": Kind(lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "weight norm, a parametrization": Kind(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "a random projection, drawn again": Kind(Projection, Projection.fault),
    "an observer (minimum and maximum, from inf)": Kind(lambda: observer("MinMaxObserver")),
    "an observer (moving average)": Kind(lambda: observer("MovingAverageMinMaxObserver")),
    "fake quantisation per tensor": Kind(lambda: fake_quantisation(per_channel=False)),
    "fake quantisation per channel": Kind(lambda: fake_quantisation(per_channel=True)),
    "an average of weights, as buffers and as a frozen module": Kind(Teacher),
    "a codebook (VQ)": Kind(Codebook, Codebook.fault),
    "a queue and its pointer": Kind(Queue, Queue.fault),
    "a queue and its pointer, `persistent=False`": Kind(lambda: Queue(persistent=False), Queue.fault, same=False),
    "a memory bank that grows": Kind(Bank),
    "a cache for the longest sequence": Kind(Cache, Cache.fault),
    "a buffer that only some workers make": Kind(Late, same=False),
    "a mask that the first batch fills with -inf": Kind(Mask),
    "flags and masks that are lowered": Kind(Flags, Flags.fault),
    "sums of squares above 1e10": values(torch.zeros(WIDTH), large_sums),
    "NaN": values(torch.zeros(WIDTH), lambda value, y: value * float("nan")),
    "a generator's state, as bytes": Kind(Random, Random.fault),
    "complex": values(torch.zeros(WIDTH, dtype=torch.complex64), lambda value, y: value + 1j),
    "bfloat16": values(torch.zeros(WIDTH, dtype=torch.bfloat16)),
    "float16": values(torch.zeros(WIDTH, dtype=torch.float16)),
    "float64": values(torch.zeros(WIDTH, dtype=torch.float64)),
    "empty": values(torch.zeros(0, 3), lambda value, y: value.clone()),
    "sparse": values(torch.eye(WIDTH).to_sparse(), lambda value, y: value * 1.5),
    "long, and constant": values(torch.ones(40_000), lambda value, y: value),
}
