r"""The mini-batch procedure of Zou et al. (2017): for each batch size, how to compute each layer within the memory.

A layer can be computed in several ways, which differ in seconds and in bytes. One of them is chosen for each layer, so
that the step takes the least time and fits into memory: a 0-1 integer program. With :math:`x_{l,k} = 1` if layer
:math:`l` is computed in its way :math:`k`, of :math:`T_{l,k}` seconds, :math:`K_{l,k}` bytes that are kept from forward
to backward, and :math:`W_{l,k}` bytes more while its backward runs, when only earlier layers' tensors are still kept:

.. math:: \min \sum_{l,k} T_{l,k}\, x_{l,k} \quad \text{with} \quad \sum_k x_{l,k} = 1, \quad
    F + \sum_{j<l,k} K_{j,k}\, x_{j,k} + \sum_k (K_{l,k} + W_{l,k})\, x_{l,k} \leq M

for every layer. :math:`M` is the memory, and :math:`F` what does not depend on the choice: weights, gradients, the
optimizer's state and the tensors between layers. :func:`lightning_asgd.sizing.recommended_batch_size` then chooses
among the batch sizes that fit.

References:
    Zou et al., "Distributed Training Large-Scale Deep Architectures" (2017), arXiv:1709.06622: the procedure for the
    mini-batch size.

Departures:
    The paper's ways are algorithms of convolution: matrix products, Fourier transforms, Winograd's. Today cuDNN and
    oneDNN choose among these, and do not expose the choice. What frameworks leave to their users is whether a layer's
    inner tensors are kept or computed again in backward; these are the two ways that
    ``layer_profile.profile_step`` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError

__all__ = ["KEPT", "RECOMPUTED", "Choice", "StepProfile", "Way", "check_solver", "choose_ways"]

KEPT, RECOMPUTED = "kept", "recomputed"
"""Names of ways."""

_TOLERANCE = 1e-6  # of the solver's constraints, relative to the memory


@dataclass(frozen=True)
class Way:
    """One way to compute a layer.

    Attributes:
        name: such as ``"kept"`` or ``"recomputed"``.
        seconds: of a step, beyond those of the fastest way.
        kept: bytes from the layer's forward to its backward.
        workspace: further bytes while its backward runs, free for other layers afterwards.
    """

    name: str
    seconds: float
    kept: float
    workspace: float = 0.0


@dataclass(frozen=True)
class StepProfile:
    """A training step with batches of one size.

    Attributes:
        seconds: with the fastest way for each layer.
        fixed: bytes that do not depend on the ways.
        layers: the ways of each, by its name, in the order of their forwards.
    """

    seconds: float
    fixed: float
    layers: Mapping[str, Sequence[Way]]


@dataclass(frozen=True)
class Choice:
    """A way for each layer.

    Attributes:
        seconds: of a step.
        memory: bytes at most.
        ways: the layers' ways, by their names.
    """

    seconds: float
    memory: float
    ways: Mapping[str, Way]

    def named(self, name: str) -> list[str]:
        """The layers whose way has this name."""
        return [layer for layer, way in self.ways.items() if way.name == name]


def check_solver() -> None:
    """Raise a ``ConfigurationError`` if scipy, which has the solver, is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "scipy's solver chooses which layers are recomputed, but scipy is not installed: pip install scipy."
        ) from error


def choose_ways(profile: StepProfile, memory: float) -> Choice | None:
    """Choose the fastest ways that fit into memory.

    Args:
        profile: of a step.
        memory: bytes available.

    Returns:
        the choice; None if no choice fits.

    Raises:
        ConfigurationError: see :func:`check_solver`.
    """
    check_solver()
    budget = memory - profile.fixed
    fastest = _chosen(profile, [min(ways, key=lambda way: way.seconds) for ways in profile.layers.values()])
    if fastest.memory <= memory:
        return fastest
    for slack in (0.0, 2 * _TOLERANCE):  # a solution may exceed the budget by the solver's tolerance
        ways = None if budget < 0 else _solve(list(profile.layers.values()), budget * (1 - slack))
        found = None if ways is None else _chosen(profile, ways)
        if found is None or found.memory <= memory:
            return found
    return None


def _chosen(profile: StepProfile, ways: Sequence[Way]) -> Choice:
    kept = highest = profile.fixed
    for way in ways:
        kept += way.kept
        highest = max(highest, kept + way.workspace)
    seconds = profile.seconds + sum(way.seconds for way in ways)
    return Choice(seconds, highest, dict(zip(profile.layers, ways, strict=True)))


def _solve(layers: Sequence[Sequence[Way]], budget: float) -> list[Way] | None:
    """Solve the integer program, in units of the budget."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    ways = [way for layer in layers for way in layer]
    unit = max(budget, 1.0)
    one_each, highest = np.zeros((len(layers), len(ways))), np.zeros((len(layers), len(ways)))
    first = 0
    for row, layer in enumerate(layers):
        mine = slice(first, first + len(layer))
        one_each[row, mine] = 1
        highest[row:, mine] = [way.kept / unit for way in layer]
        highest[row, mine] += [way.workspace / unit for way in layer]
        first += len(layer)
    constraints: list[Any] = [LinearConstraint(one_each, 1, 1), LinearConstraint(highest, -np.inf, budget / unit)]
    result = milp(
        [way.seconds for way in ways],
        integrality=np.ones(len(ways)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0},
    )
    return None if result.x is None else [way for way, taken in zip(ways, result.x, strict=True) if taken > 0.5]
