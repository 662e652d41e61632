r"""Decoupled DiLoCo: rounds of outer momentum that neither a slow nor a lost worker holds up.

Fragment *p* of the module is exchanged every ``nsync`` steps. The servers merge its pushes once *K* workers have
pushed, after a grace period for the others, and take a Nesterov step. Workers train on meanwhile, and mix the result
into their weights. Per tensor, with the steps :math:`s_i` and the samples or tokens :math:`c_i` in a push:

.. math::

    D = \mathrm{RDA}\{(w_i, D_i)\}, \quad w_i = \frac{c_i^2}{s_i}, \qquad
    m \leftarrow B m + D, \quad w \leftarrow w - \epsilon\,(D + B m), \qquad x \leftarrow \alpha x + (1 - \alpha) w

The grace period lasts :math:`\gamma\,(\tau \xi - t_K)` seconds from the *K*-th push on: of the
:math:`\tau = nsync / P` steps until the next fragment's exchange, which take :math:`\xi` seconds each, the part that
waiting for this push (:math:`t_K`) has left.

References:
    A. Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", arXiv 2604.21428, section 3 and
    appendix D.

Departures:
    Workers push after ``nsync`` steps; the paper's synchronizer asks all of them at once. So the pushes of a period may
    be merged in several rounds: each moves the weights by its workers' share of the samples. The paper takes a whole
    step per round. Together the rounds move the weights as far as one of all would, where the pushes point the same
    way, and less far where they do not: a direction is averaged within a round only.
    :math:`D_i` is the change since worker *i* last merged the fragment, not its distance from the servers' present
    weights. A push that arrives after its round counts in the next one, and is not dropped.
    Each server ends its rounds by itself, so a push may be in different rounds on two servers. It looks at its clock
    four times a second: a grace period may last a quarter of a second longer. The paper also takes the time of the
    transfer off the grace period. Here it is not known in advance.
    *K* is half of the workers by default (the paper: mostly 1), and *B* is capped: these two are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_asgd.algorithms.diloco import InFragments
from lightning_asgd.algorithms.merging import RadialDirectional
from lightning_asgd.core.algorithms.base import Table, Transform
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, between, whole


@dataclass(frozen=True)
class Quorum(Transform):
    """Apply the mean of pushes once enough workers have pushed, and a grace period for the others is over.

    Workers train on until their reply arrives. No worker waits for workers that have left or are at a sync point.

    Args:
        least: workers that must have pushed, *K*; None for half of those that train.
        grace: the part of the time that waiting costs nothing, for which the servers wait for the others.
        overlap: this time as a part of the period, ``nsync`` steps of the fastest worker.
        most_s: seconds of grace at most.

    Example:
        >>> table = Table(living={0, 1, 2}, gathered={0, 1}, arrivals=[5.0, 6.0], speeds={0: 2.0}, nsync=8, now=7.0)
        >>> Quorum(2).ready(table), Quorum(2, grace=0.0).ready(table)  # two of the four seconds have passed
        (False, True)
    """

    least: int | None = None
    grace: float = 1.0
    overlap: float = 1.0
    most_s: float = 60.0
    gathers: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    runs_ahead: ClassVar[bool] = True
    timed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.least is not None:
            whole("Quorum(least)", self.least, 1)
        between("Quorum(grace)", self.grace, 0, 1)
        between("Quorum(overlap)", self.overlap, 0, 1)
        at_least("Quorum(most_s)", self.most_s, 0)

    def share(self, batch: float, steps: int) -> float:
        """See :class:`Transform`: what was trained, times what each step has trained."""
        return batch * steps * batch

    def ready(self, table: Table) -> bool:
        """See :class:`Transform`."""
        if table.active <= table.gathered:
            return True
        least = self.least or -(-len(table.active | table.gathered) // 2)
        if len(table.arrivals) < least:
            return False
        first, enough = table.arrivals[0], table.arrivals[least - 1]
        speed = max((table.speeds.get(worker, 0.0) for worker in table.active | table.gathered), default=0.0)
        free_s = self.overlap * table.nsync / speed if speed > 0 else 0.0
        return table.now >= enough + min(self.grace * max(free_s - (enough - first), 0.0), self.most_s)

    def holds(self, worker: int, table: Table) -> bool:
        """See :class:`Transform`."""
        return worker in table.gathered


@dataclass(frozen=True)
class DecoupledDiLoCo(InFragments):
    r"""Rounds of the workers that have pushed in time; see the formulas above.

    Args:
        lr: the outer learning rate.
        momentum: the outer momentum *B*, or ``"capped"``; the paper has 0.9.
        parts: *P*, fragments of the module; the paper has 24. Each parameter, the largest first, goes to the fragment
            that is the smallest then. The paper has embeddings apart.
        alpha: the part of its own weights that a worker keeps when it mixes in a reply.
        quorum: *K*, workers that must have pushed; None for half of those that train. The paper has 1 in most runs.
        grace: :math:`\gamma`, the part of the time that the overlap leaves, for which servers wait for the others.

    State:
        ``momentum``, one vector per shard, and the pushes of the present round, another.

    Staleness:
        of a push is the number of rounds since its worker last merged the fragment; it is ignored.
    """

    quorum: int | None = None
    grace: float = 1.0

    always: ClassVar[tuple[Transform, ...]] = ()

    def __post_init__(self) -> None:
        whole("DecoupledDiLoCo(parts)", self.parts, 1, 1024)
        if self.quorum is not None:
            whole("DecoupledDiLoCo(quorum)", self.quorum, 1)
        unset = (self.quorum, self.grace) == (None, 1.0)
        for each in (t for t in self.transforms if isinstance(t, Quorum)):  # a copy of this rule has the one it made
            if unset and replace(each, overlap=1.0) != Quorum():
                raise ConfigurationError(
                    f"DecoupledDiLoCo(transforms) holds {each!r}. Expected the arguments quorum and grace instead, "
                    f"such as DecoupledDiLoCo(quorum={each.least}, grace={each.grace:g}): the rule makes its own."
                )
        given = [t for t in self.transforms if not isinstance(t, Quorum)]
        merges = [] if any(isinstance(t, RadialDirectional) for t in given) else [RadialDirectional()]
        object.__setattr__(self, "transforms", (*given, *merges, Quorum(self.quorum, self.grace, 1 / self.parts)))
        super().__post_init__()
