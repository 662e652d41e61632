"""One shard: its weights, its version, and what it does with a push. No network, no clock, no threads.

A message comes with a *buffer*, one tensor per group, which holds the update on entry and the answer on return: the
worker's block where memory is shared, else the tensors that the message brought. Weights change in place, chunk by
chunk, and each chunk is copied into the buffer while it is in the cache. A worker gets the version right after its own
update.

A transform may aggregate pushes, to apply them together, and may block replies. So a call returns the replies that
have become due, which may be none, and may be other workers'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.core.algorithms.base import MAX_BATCH, Algorithm, Answer, Push, SampleShares, Table, Transform
from lightning_asgd.core.foundation.errors import ProtocolError, WorkerLostError
from lightning_asgd.core.foundation.layout import Groups, check_form, dense
from lightning_asgd.core.foundation.numerics import MAX_UPDATE, is_small_enough
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Exchange, Reply
from lightning_asgd.core.server.group_rules import GroupRules, PiecewiseCopy, Tensors
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.tables.rows.server import Tables

REFUSED_IN_A_ROW = 20
"""Updates of a worker after which it is stopped, if none of them could be applied."""

Buffer = Sequence[Tensor]


@dataclass
class _Counts:
    applied: int = 0
    repeated: int = 0
    refused: int = 0
    dropped: int = 0
    fetched: int = 0


@dataclass
class _Asked:
    """An exchange that has not been answered."""

    message: Exchange
    buffer: Buffer | None
    staleness: int = 0
    verdict: Verdict = Verdict.NONE
    filled: bool = False  # whether the buffer holds the answer already


@dataclass
class Shard:
    """The weights of one server. Where ``comes_and_goes``, a worker counts from its first push on."""

    groups: Groups
    algorithm: Algorithm
    comes_and_goes: bool = False
    tensors: Sequence[Tensors] = ()  # per group; none where no rule asks for them
    widths: Sequence[int] = ()  # scalars of a row, of each group of tables
    version: int = 0
    weights: tuple[Tensor, ...] = ()  # none before :meth:`initialise`
    counts: _Counts = field(default_factory=_Counts)
    table: Table = field(default_factory=Table)
    samples: deque[tuple[int, tuple[Tensor, ...]]] = field(default_factory=deque)
    """What the algorithm wanted kept: versions, and copies of the weights at them, oldest first."""
    latest_push: dict[int, int] = field(default_factory=dict)  # per worker, its number
    _applied: dict[int, int] = field(default_factory=dict)  # the same, when pushes were last aggregated
    _counted: SampleShares = field(default_factory=SampleShares)  # the workers that a mean is over
    _known: set[int] = field(default_factory=set)  # workers that took part at the last call
    _refused: dict[int, int] = field(default_factory=dict)  # per worker, pushes in a row
    _asked: list[_Asked] = field(default_factory=list)
    _rules: list[GroupRules] = field(default_factory=list)  # per group
    _tables: Tables | None = None  # the last groups
    _largest: GroupRules | None = None  # of them
    _backups: dict[int, list[Tensor]] = field(default_factory=dict)  # per worker
    _copy: PiecewiseCopy | None = None  # for the latest snapshot
    _gain: float = 0.0  # of the latest update
    _lr: float = 0.0  # sums over the aggregated pushes
    _steps: int = 0
    _weights: float = 0.0  # in units of the first one
    _first: float = 0.0  # what a step of that one has trained; 0 if it is not known

    def __post_init__(self) -> None:
        self.whole = dense(self.groups)
        """The groups that are exchanged whole."""

    @property
    def initialised(self) -> bool:
        """Whether the shard has weights."""
        return bool(self.weights)

    def initialise(self, weights: Sequence[Tensor], version: int) -> None:
        """Take first weights, one tensor per group, given away by the caller; ``version`` is counted on from."""
        check_form(weights, self.groups)
        tensors = self.tensors or [() for _ in self.groups]
        if len(tensors) != len(self.groups):
            raise ProtocolError(f"A shard of {self.groups} was laid out as {len(tensors)} groups of tensors.")
        whole = len(self.whole)
        self._tables = Tables(self.algorithm, whole, weights[whole:], self.widths) if self.widths else None
        self._rules = [GroupRules(self.algorithm, w, named) for w, named in zip(weights[:whole], tensors, strict=False)]
        self._rules += self._tables.rules if self._tables else []
        self._largest = max(self._rules, key=lambda rules: rules.weights.numel(), default=None)
        self.weights, self.version = tuple(weights), version
        self._backups = {}
        self.samples = deque(maxlen=self.algorithm.keep_at_most)

    def resume(self, weights: Sequence[Tensor], version: int, pushes: Mapping[int, int]) -> None:
        """Take a worker's copy of a lost shard; ``pushes`` are the latest of each worker that these weights hold."""
        if not self.weights:
            self.initialise(weights, version)
        else:  # it was revived; workers push again what these weights lack
            self.replace(weights)
            self.version = version
        self.latest_push, self._applied = dict(pushes), dict(pushes)
        self._counted = SampleShares()  # the membership's own set may have lost workers since the last count
        for worker in self.table.living:
            self._count(worker)

    def replace(self, weights: Sequence[Tensor]) -> None:
        """Take other weights, one tensor per group, and keep what the algorithm keeps but for aggregated pushes."""
        check_form(weights, self.groups)
        self._finish_copy()
        for mine, theirs in zip(self.weights, weights, strict=True):
            mine.copy_(theirs)
        self.version += 1
        self._forget_gathered()
        for rules in self._rules:
            rules.replaced()

    def snapshot(self, copy: PiecewiseCopy) -> dict[str, Any]:
        """Everything but the workers' own state, as plain values; its vectors are filled as the copy proceeds."""
        self._finish_copy()
        self._copy = copy
        return {
            "groups": self.groups,
            "tensors": self.tensors,
            "widths": self.widths,
            "algorithm": self.algorithm,
            "version": self.version,
            "weights": tuple(copy.of(i, w) for i, w in enumerate(self.weights)),
            "state": [rules.snapshot(i, copy) for i, rules in enumerate(self._rules)],
            "pending": [copy.of(i, rules.pending) for i, rules in enumerate(self._rules)],
            "gathered": (self.table.count, self._lr, self._steps, self._weights, self._first),
            "samples": list(self.samples),  # never changed
        }

    @classmethod
    def restore_from_snapshot(cls, kept: Mapping[str, Any], *, comes_and_goes: bool = False) -> Shard:
        """A shard that continues from a snapshot, with other workers."""
        shard = cls(kept["groups"], kept["algorithm"], comes_and_goes, kept["tensors"], kept["widths"])
        shard.initialise(kept["weights"], kept["version"])
        for rules, state, pending in zip(shard._rules, kept["state"], kept["pending"], strict=True):
            rules.restore(state)
            rules.pending = None if pending is None else pending.to(rules.exact.dtype)
        shard.table.count, shard._lr, shard._steps, *rest = kept["gathered"]
        shard._weights, shard._first = rest or (float(shard.table.count), 0.0)  # before release 0.2 all weighed 1
        shard.samples.extend(kept["samples"])
        return shard

    def state(self) -> list[dict[str, Any]]:
        """What the algorithm and its transforms keep per group beside the weights, for a checkpoint."""
        return [rules.state(lambda value, _: deepcopy(value)) for rules in self._rules]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        """Take what :meth:`state` returned. The pushes that had been aggregated then are in no checkpoint.

        Until protocol 34 servers held buffers, too. Nothing was kept for their groups.
        """
        self._finish_copy()
        for saved, rules in zip(filter(None, state), self._rules, strict=True):
            rules.restore(saved)
            rules.forget_gathered()

    def forget(self, worker: int, *, replaced: bool = False) -> None:
        """Keep nothing for a worker that has left permanently, but its steps and latest push if it is replaced."""
        steps: tuple[Any, ...] = () if replaced else (self.latest_push, self._applied, self.table.steps)
        for kept in (*steps, self._refused, self._backups, self.table.clocks, self.table.speeds, self.table.batches):
            kept.pop(worker, None)
        self.table.resting.discard(worker)
        self._count(worker)

    def update_members(self, living: Collection[int], changed: Collection[int] | None = None) -> list[Completion]:
        """Note which workers take part now: no worker waits for a worker that is gone, or has not begun to train.

        A set is not copied, and may change: ``changed`` are then those that have joined or gone since the last call.
        """
        before, noted = self.table.living, set(changed or ())
        if before is not living:
            self.table.living = living if isinstance(living, set) else set(living)
            noted |= before ^ self.table.living
        for worker in noted:
            self._count(worker)
            if self.comes_and_goes and worker in living and worker not in self._known:
                self.table.resting.add(worker)
            (self._known.add if worker in living else self._known.discard)(worker)
        if self.algorithm.waits:
            self.table.catch_up(noted & self.table.living)
        return self._due() if self.weights else []

    def tick(self, now: float) -> list[Completion]:
        """Apply the aggregated pushes if they are due by now, and answer what has become due."""
        self.table.now = max(self.table.now, now)
        return self._due() if self.table.count and self.algorithm.timed else []

    def exchange(self, message: Exchange, buffer: Buffer | None, now: float = 0.0) -> list[Completion]:
        """Apply a push once, and answer with the weights if they are wanted.

        The buffer, of the shard's form, holds the update on entry and the answer on return; it is None if the message
        brings no update and there is no shared block. This answer is not always among those that become due.
        """
        if not self.weights:
            raise ProtocolError(
                f"Worker {message.worker} exchanged before the shard had weights. Expected worker 0 to initialise it."
            )
        table, worker, asked, tables = self.table, message.worker, _Asked(message, buffer), self._tables
        table.now = max(table.now, now)
        if 0 < message.batch < MAX_BATCH:
            table.batches[worker] = message.batch
            self._count(worker)
        if tables:
            tables.check(message)
        if message.push:
            if buffer is None:
                raise ProtocolError(f"Worker {worker} pushed nothing: expected an update of {self.groups}.")
            # Where memory is shared a look from here would protect from nothing: the worker may change it at any time.
            trusted = message.shared and message.within_bounds
            last = self.latest_push.get(worker, 0)
            self.latest_push[worker] = max(last, message.seq)
            self._count(worker)
            if message.seq <= last:
                asked.verdict = Verdict.REPEATED
                self.counts.repeated += 1
            elif (trusted or all(map(is_small_enough, buffer, self.weights))) and (
                not tables or tables.are_small(message)
            ):
                self._refused.pop(worker, None)
                asked.verdict, asked.staleness = Verdict.APPLIED, max(0, self.version - message.base_version)
                self._take(asked, buffer)
            else:
                asked.verdict = Verdict.REFUSED
                self._refuse(worker)
            if tables:
                tables.note(message)
        if self.comes_and_goes and message.full and worker in table.resting and table.count:
            self._apply_gathered()  # the final weights of an interval hold all pushes, though others still train
        if message.rest:
            table.resting.add(worker)
            table.clocks.pop(worker, None)
        else:
            table.resting.discard(worker)
            table.clocks[worker] += message.push
        table.steps[worker] += message.steps
        if message.speed > 0:
            table.speeds[worker] = message.speed
        table.nsync = message.nsync or table.nsync
        self._asked.append(asked)
        return self._due()

    # ------------------------------------------------------------------ a push

    def _refuse(self, worker: int) -> None:
        """Count an update that cannot be applied, and stop a worker that has sent too many of them."""
        self.counts.refused += 1
        refused = self._refused[worker] = self._refused.get(worker, 0) + 1
        if refused >= REFUSED_IN_A_ROW:
            raise WorkerLostError(
                f"Worker {worker} was stopped: its last {refused} updates held NaN, infinity or values above "
                f"{MAX_UPDATE:g}. Look at its data and its machine; lower the learning rate or clip gradients."
            )

    def _take(self, asked: _Asked, update: Buffer) -> None:
        """Weigh a push, and apply it or add it to the aggregate."""
        message, algorithm = asked.message, self.algorithm
        push = Push(
            worker=message.worker,
            seq=message.seq,
            payload=algorithm.payload,
            staleness=asked.staleness,
            steps=max(message.steps, 1),
            lr=message.lr,
            live=max(len(self._counted), 1),
            weight=self._counted.weight(self.table.batches.get(message.worker, 0.0)),
            version=self.version,
        )
        gatherer = next((t for t in algorithm.transforms if t.gathers), None)
        weighs = scale = self._weigh(gatherer, message) if gatherer else 1.0
        for transform in algorithm.transforms:
            weight = transform.weigh(push)
            if weight is None:
                self.counts.dropped += 1
                asked.verdict = Verdict.DROPPED
                return
            scale *= weight
        self.counts.applied += 1
        copy_back = message.fetch and not gatherer and not algorithm.waits
        if gatherer:
            push = replace(push, scale=scale)
        if self._tables:
            self._tables.push(message, push, scale, self._before)
        for index in range(len(self.whole)):
            rules, before = self._rules[index], self._before(index)
            backup = self._backups[push.worker][index] if push.worker in self._backups else rules.weights
            rules.push(update[index], push, scale, backup, copy_back=copy_back, before=before)
        if gatherer:
            if message.worker not in self.table.gathered:
                self.table.arrivals.append(self.table.now)
            self.table.gathered.add(message.worker)
            self.table.count += 1
            self._lr += message.lr
            self._steps += message.steps
            self._weights += weighs
        else:
            self._count_up()
        asked.filled = copy_back

    def _weigh(self, gatherer: Transform, message: Exchange) -> float:
        """The weight of a push among those that are aggregated; the first one's is 1."""
        share = gatherer.share(message.batch, max(message.steps, 1)) if 0 < message.batch < MAX_BATCH else 0.0
        if not self.table.count:
            self._first = share
        return share / self._first if min(share, self._first) > 0 else 1.0

    def _apply_gathered(self) -> None:
        """Apply the mean of the aggregated pushes as one update."""
        table, algorithm = self.table, self.algorithm
        live, count = max(len(self._counted), 1), table.count
        steps, lr = max(1, round(self._steps / count)), self._lr / count
        shares = [self._counted.weight(table.batches.get(worker, 0.0)) for worker in table.gathered]
        about: dict[str, Any] = {"live": live, "count": count, "weight": fmean(shares or [1.0]), "steps": steps}
        push = Push(worker=-1, payload=algorithm.payload, lr=lr, version=self.version, **about)
        for index, rules in enumerate(self._rules):
            rules.apply_gathered(self._weights, push, self._before(index))
        self._applied = dict(self.latest_push)
        self._forget_gathered()
        self._count_up()

    def _forget_gathered(self) -> None:
        self.table.gathered.clear()
        self.table.arrivals.clear()
        self.table.count, self._lr, self._steps, self._weights = 0, 0.0, 0, 0.0

    def _count_up(self) -> None:
        """An update has been applied."""
        self.version += 1
        self._gain = self._largest.gain if self._largest else 0.0
        if self.algorithm.keeps(self.version):
            self.samples.append((self.version, tuple(w.clone() for w in self.weights)))

    # ------------------------------------------------------------------ answers

    def _due(self) -> list[Completion]:
        """Apply the aggregated pushes if it is time, and answer every worker that need not wait."""
        table, transforms = self.table, self.algorithm.transforms
        if table.count and (not table.active or all(t.ready(table) for t in transforms if t.gathers)):
            self._apply_gathered()
        due, held = [], []
        for asked in self._asked:
            worker = asked.message.worker
            waits = asked.message.may_wait and worker in table.living and worker not in table.resting
            if waits and any(t.holds(worker, table) for t in transforms):
                held.append(asked)
            else:
                due.append(Completion(asked.message, self._answer(asked)))
        self._asked = held
        return due

    def _answer(self, asked: _Asked) -> Reply:
        message, buffer = asked.message, asked.buffer
        if message.fetch:
            self.counts.fetched += 1
            if buffer is None:
                buffer = tuple(t.clone() for t in self.weights[: len(self.whole)])
            elif not asked.filled:
                self._fill(asked, buffer)
            self._back_up(message.worker)
        period = message.nsync
        for transform in self.algorithm.transforms:
            period = transform.period(message.worker, self.table, period)
        weights = tuple(buffer) if buffer is not None and message.fetch and not message.shared else None
        pushes = dict(self._applied if self.table.count else self.latest_push) if message.fetch else {}
        rows = self._tables.lacking(message) if self._tables and message.fetch else ()
        about = self.version, asked.staleness, asked.verdict, weights, rows, period
        return Reply(*about, pushes=pushes, gain=self._gain)

    def _fill(self, asked: _Asked, buffer: Buffer) -> None:
        force = asked.message.push and self.algorithm.answer is Answer.FORCE
        for weights, out in zip(self.weights[: len(self.whole)], buffer, strict=True):
            if not force:
                out.copy_(weights)
            elif asked.verdict is not Verdict.APPLIED:
                out.zero_()

    def _back_up(self, worker: int) -> None:
        """Note what a worker starts from, if a transform wants to know."""
        if not any(t.backup for t in self.algorithm.transforms):
            return
        kept = self._backups.setdefault(worker, [torch.empty_like(w) for w in self.weights])
        for backup, weights in zip(kept, self.weights, strict=True):
            backup.copy_(weights)

    # ------------------------------------------------------------------ helpers

    def _count(self, worker: int) -> None:
        """Count a worker in means, or not, as it is now."""
        counts = worker in self.table.living and (worker in self.latest_push or not self.comes_and_goes)
        self._counted.put(worker, self.table.batches.get(worker, 0.0) if counts else None)

    def _before(self, index: int) -> Callable[[slice], None]:
        """What to call before a part of a group changes."""

        def copy(part: slice) -> None:
            if self._copy is not None and self._copy.left:
                self._copy.before_change(index, part)

        return copy

    def _finish_copy(self) -> None:
        if self._copy is not None:
            self._copy.finish()
