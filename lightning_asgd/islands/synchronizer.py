"""An island's exchanges as one of its processes sees them, and how an island enters a session."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.layout import Layout, build_layout
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.worker.exchange_period import Schedule
from lightning_asgd.core.worker.exchanger import Channel, Exchanger
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.setup import Start, check_shapes, fragments_of, trainable_parameters, warn_if_fewer
from lightning_asgd.core.worker.synchronizer import Held, Skipped, Synchronizer, Training, Waits, run
from lightning_asgd.islands.blocks import block_of, is_sharded, local_places, part_layout, reshard
from lightning_asgd.islands.exchanger import IslandReplica, IslandShards
from lightning_asgd.islands.group import IslandGroup
from lightning_asgd.islands.part_exchange import Copies, PartExchange, PartSender

_MOST = 64  # steps
_LATE = 8  # an answer is noticed late by at most an eighth of its round trip, or by one step


def steps_to_look(
    schedule: Schedule, steps: int, looked: int, since_s: float | None, step_s: float, *, offline: int
) -> int:
    """After how many more steps one exchange is to be looked at; 0: before the next batch.

    ``looked``: steps taken at the latest look. ``since_s``: since an unanswered exchange began; None if none is in
    flight. ``step_s``: seconds per step, 0 if unknown. ``offline``: steps that the worker may take without an exchange.
    """
    due = next((more for more in range(_MOST) if any(schedule.due(steps + more, more))), _MOST)
    if since_s is None:
        return due or int(looked == steps)  # it was not begun, since a sync point is near
    if due == 0 and not any(schedule.due(looked, looked - steps)):
        return 0  # it is deferred, which counts once
    expected_s = max(schedule.trip_s - since_s, since_s / _LATE)
    looks = max(1, min(_MOST, round(expected_s / step_s) if step_s else 1))
    return min(looks, due or max(0, offline - schedule.since_push))


class IslandSynchronizer(Synchronizer):
    """Calls the first process's exchanger on all processes together; see :class:`Synchronizer`."""

    def __init__(
        self,
        group: IslandGroup,
        layout: Layout,
        parts: Sequence[PartExchange],
        exchanger: Exchanger | None,
        offline: int,
    ) -> None:
        self.layout, self._group, self._parts, self._exchanger = layout, group, parts, exchanger
        self._shards = [cast(IslandShards, channel.shards) for channel in (exchanger.channels if exchanger else ())]
        self._offline = offline  # steps that the island may take without an exchange
        self._looked = -1  # steps that were taken when the first process last did what was due
        self._stats = ExchangeStats() if exchanger is None else exchanger.stats
        group.report("exchanges", self._report)
        group.share(lambda: None)

    def _report(self) -> list[Any]:
        """Versions, whether steps were taken since the last fetch, and the steps until something is to be done."""
        exchanger = self._exchanger
        if exchanger is None:
            return []
        attends = exchanger.client.connection.must_attend
        looks = 0 if attends else min(map(self._steps_to_look, exchanger.channels, self._shards))
        return [exchanger.versions, exchanger.moved, looks]

    def _steps_to_look(self, channel: Channel, shards: IslandShards) -> int:
        pending, steps = channel.log.in_flight, channel.stats.steps
        if channel.leaving is not None:
            return 0
        if pending is not None and shards.arrived_here(pending.futures):
            return int(self._looked == steps)  # another process lacks its part
        since_s = None if pending is None else time.perf_counter() - pending.begun
        step_s = 0.0 if pending is None else pending.step_s
        return steps_to_look(channel.schedule, steps, self._looked, since_s, step_s, offline=self._offline)

    def _together(self, call: Callable[[Exchanger], Waits]) -> Waits:
        def lead() -> None:
            if self._exchanger is not None:
                run(call(self._exchanger))

        lead.__qualname__ = call.__qualname__
        self._group.share(lead)
        return ()

    @property
    def exchanger(self) -> Exchanger | None:
        """The island's, on its first process."""
        return self._exchanger

    @property
    def stats(self) -> ExchangeStats:
        """The island's on its first process; on the others only the steps are counted."""
        return self._stats if self._exchanger is None else self._exchanger.stats

    @stats.setter
    def stats(self, stats: ExchangeStats) -> None:
        self._stats = stats
        if self._exchanger is not None:
            self._exchanger.stats = stats

    @property
    def versions(self) -> Sequence[int]:
        """See :class:`Synchronizer`, here and below."""
        versions: Sequence[int] = self._group.known["exchanges"][0]
        return versions

    @property
    def moved(self) -> bool:
        """Whether steps were taken since the last fetch."""
        return bool(self._group.known["exchanges"][1])

    @property
    def unacknowledged(self) -> int:
        """Steps that servers have not acknowledged; only the first process is asked for them."""
        return 0 if self._exchanger is None else self._exchanger.unacknowledged

    @property
    def constants(self) -> bytes:
        """Not compared: workers of an elastic run take the first one's."""
        return b""

    def begin(self) -> Waits:
        """Leave a sync point."""
        return self._together(lambda exchanger: exchanger.begin())

    def count_step(self, skipped: Skipped = False) -> None:
        """Note a step, on every process."""
        known = self._group.known["exchanges"]
        known[1], known[2] = True, known[2] - 1
        if self._exchanger is not None:
            self._exchanger.count_step(skipped)
            return
        self._stats.steps += 1
        for part in self._parts:
            part.accrue(skipped)

    def advance(self) -> Waits:
        """Do what is due between two batches, if the first process expected anything when it reported last."""
        if self._group.known["exchanges"][2] > 0:
            return ()

        def look(exchanger: Exchanger) -> Waits:
            for channel, shards in zip(exchanger.channels, self._shards, strict=True):
                if (pending := channel.log.in_flight) is not None:
                    pending.held = not shards.arrived_everywhere(pending.futures)
            yield from exchanger.advance()
            self._looked = exchanger.stats.steps

        return self._together(look)

    def flush(self) -> Waits:
        """Complete the exchange in flight and push the rest, of which each process has a part."""
        self._group.expect_same_steps(self.stats.steps)
        return self._together(lambda exchanger: exchanger.flush())

    def fetch(self, *, park: bool = False) -> Waits:
        """Adopt the servers' weights."""
        return self._together(lambda exchanger: exchanger.fetch(park=park))

    def come_back(self) -> Waits:
        """Rejoin with the servers' weights."""
        return self._together(lambda exchanger: exchanger.come_back())

    def catch_up(self) -> dict[str, Tensor]:
        """Nothing: a checkpoint of an island holds its own weights, which every process has its blocks of."""
        return {}

    peek = catch_up

    @property
    def caught_up(self) -> Held:
        """What the weights fetched last hold; see :class:`Synchronizer`. All processes ask together."""

        def look() -> Held:
            channels = [] if self._exchanger is None else self._exchanger.channels
            return (channels[0].log.epoch, channels[0].log.done) if len(channels) == 1 else ("", None)

        return self._group.share(look)

    def state(self) -> list[list[Any]]:
        """What the servers keep beside the weights; on the first process. All processes ask together."""
        found: list[list[Any]] = []

        def ask() -> None:
            found.extend([] if self._exchanger is None else self._exchanger.state())

        self._group.share(ask)
        return found

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        """Restore it. All processes call this together: a server may be lost meanwhile."""

        def restore() -> None:
            if self._exchanger is not None:
                self._exchanger.restore(state)

        self._group.share(restore)

    def close(self) -> None:
        """Release this process's buffers."""
        for part in self._parts:
            part.replica.close()


def set_up_island(
    group: IslandGroup,
    module: Module,
    sender: PartSender,
    client: SessionClient | None,
    config: ExchangeConfig,
    training: Training,
    start: Start,
) -> IslandSynchronizer:
    """Lay the module out over the servers, fill them if the island brings the first weights, and take theirs.

    All processes call it together; ``client`` is the first one's. For the rest see ``worker_setup.set_up``.
    """
    check_shapes(module)
    trainable = trainable_parameters(module)
    algorithm, num_servers = config.algorithm, len(sender.connection.servers)
    layout = build_layout(trainable.items(), num_servers)
    if start.layout is not None:
        layout.check_same(start.layout, f"worker {sender.connection.worker}", "the run")
    _check_copies(group, {name: tensor for name, tensor in trainable.items() if not is_sharded(tensor)})
    mine = {name: block_of(name, tensor) for name, tensor in trainable.items()}
    gathered = group.gather(mine)
    blocks = {name: [each[name] for each in gathered] for name in mine}
    modules = list(module.modules())
    parts, fragments = [], fragments_of(trainable, algorithm.fragments, num_servers)
    warn_if_fewer(algorithm, len(fragments))
    reshard(modules)
    for number, fragment in enumerate(fragments):
        held, places = part_layout(fragment, blocks, group.rank), local_places(module, fragment)
        values = [None] * num_servers
        how = {"remembers": config.restorable, "offload": config.offload}
        replica = replica_for(algorithm, held, places, values, **how)  # type: ignore[arg-type]
        copies = Copies(group, held, places, blocks)
        about = group, sender, number, held, replica, copies
        parts.append(PartExchange(*about, lambda: reshard(modules)))

    def lead() -> Exchanger | None:
        if client is None:
            return None
        filled: list[tuple[Any, Any]] = []
        for fragment, part in zip(fragments, parts, strict=True):
            shards = IslandShards(client, part)
            shards.fill(fragment, algorithm, start.versions, brings=bool(start.fill))
            filled.append((shards, IslandReplica(fragment, part)))
        exchanger = Exchanger(layout, filled, config, training)
        run(exchanger.fetch(together=False))
        exchanger.stats = ExchangeStats()
        made.append(exchanger)
        return None

    made: list[Exchanger] = []
    group.share(lead)
    offline = 0 if algorithm.lockstep else config.max_offline_steps
    return IslandSynchronizer(group, layout, parts, made[0] if made else None, offline)


def _check_copies(group: IslandGroup, whole: Mapping[str, Tensor]) -> None:
    """Raise unless all processes have the same values of the parameters that each of them holds as a whole."""
    for name, sums in group.differing(whole).items():
        other = next(rank for rank, each in enumerate(sums) if each != sums[0])
        raise ConfigurationError(
            f"Parameter {name!r} is not sharded, but processes 0 and {other} of this island have different values of "
            "it. Expected copies of the same values, which the processes exchange parts of. Seed them equally with "
            "seed_everything() before the module is made, or shard the parameter with fully_shard or "
            "parallelize_module. Parameters that belong to one process, such as its experts, do not work in an island."
        )
