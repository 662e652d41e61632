"""All that a server knows of one session, in one object: a new session begins with nothing of the one before."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from lightning_asgd.core.foundation.errors import ProtocolError, WorkerLostError
from lightning_asgd.core.protocol.collective import Ranks
from lightning_asgd.core.protocol.session import Heartbeat, HeartbeatReply, Join, Joined, WorkerMetrics
from lightning_asgd.core.protocol.update import InitShard, ShardState
from lightning_asgd.core.server.collective_table import CollectiveTable
from lightning_asgd.core.server.membership import Membership
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.core.server.update_buffers import Buffers


@dataclass
class SessionState:
    """One session. Epochs are not part of it: a new layout in the middle of an epoch does not change it."""

    members: Membership
    collectives: CollectiveTable = field(init=False)
    shards: dict[int, Shard] = field(default_factory=dict)  # by fragment
    buffers: Buffers = field(default_factory=Buffers)
    have_weights: set[int] = field(default_factory=set)  # workers that can report them if this server is lost
    restorable: bool = True  # whether its workers can bring a replacement what this server has
    _listed: tuple[tuple[int, int], Ranks, Ranks] | None = None  # see :meth:`_present`

    def __post_init__(self) -> None:
        self.collectives = CollectiveTable(self.members)

    @property
    def initialised(self) -> bool:
        """Whether all shards have weights."""
        return bool(self.shards) and all(shard.initialised for shard in self.shards.values())

    @property
    def held_by_workers(self) -> bool:
        """Whether workers hold all that is needed to replace this server."""
        holding = self.have_weights & (self.members.living | self.members.expected_back)
        whole = all(shard.algorithm.leaves_weights for shard in self.shards.values())
        return bool(holding and self.shards) and whole and self.restorable

    def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        """The state of the session that a worker gets when it sends its metrics."""
        members, worker = self.members, message.worker
        if members.aborted:
            raise WorkerLostError(members.aborted)
        if isinstance(message.figures, WorkerMetrics):
            members.metrics[worker] = message.figures
        chief, (living, holding) = members.chief, self._present()
        return HeartbeatReply(
            members.events_after(message.heard),
            living,
            dict(members.metrics) if worker == chief else {},
            chief,
            holding,
            members.admitted,
            worker in members.fenced,
            self.collectives.needed,
        )

    def _present(self) -> tuple[Ranks, Ranks]:
        """The living workers, and those of them that hold weights: the same objects until either changes."""
        living = self.members.living
        state = self.members.composition, len(self.have_weights)  # none ceases to hold any without leaving
        if self._listed is None or self._listed[0] != state:
            self._listed = state, Ranks.of(living), Ranks.of(living & self.have_weights)
        return self._listed[1:]

    def initialise(self, message: InitShard) -> bool:
        """Prepare a worker's exchanges, and take weights that it brings. Returns whether they can use shared memory."""
        shard = self.shards[message.fragment]
        if shard.groups != message.groups:
            raise ProtocolError(
                f"Worker {message.worker} expects a shard of {message.groups}, others one of {shard.groups}."
            )
        if (shard.tensors, shard.widths) != (message.tensors, message.widths):
            raise ProtocolError(f"Worker {message.worker} expects a shard of other tensors than the workers before it.")
        if self.members.elastic and shard.algorithm != message.algorithm:
            raise ProtocolError(
                f"Worker {message.worker} has the algorithm {message.algorithm}, the run {shard.algorithm}. Expected "
                "the same arguments of ASGDStrategy on every worker."
            )
        self.restorable &= message.restorable
        if message.weights is not None:
            shard.initialise(message.weights, message.version)
        return self.buffers.open(message)

    def shard_state(self, message: ShardState) -> Any:
        """Return what a checkpoint holds of a shard, or restore it from that, or replace the shard's weights."""
        shard = self.shards.get(message.fragment)
        if shard is None:
            raise ProtocolError(f"Worker {message.worker} requested a shard that was not set up.")
        if message.weights is not None:
            self.buffers.forget_common(message.fragment)
            return shard.replace(message.weights)
        try:
            return shard.state() if message.state is None else shard.restore(message.state)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ProtocolError(
                f"Worker {message.worker} sent a state that does not fit its shard: {error!r}. Expected what a "
                "checkpoint holds of the same algorithm and layout."
            ) from error

    def tick(self, now: float) -> list[Completion]:
        """What has become due as time has passed."""
        due = self.collectives.expire(now)
        for shard in self.shards.values():
            due += shard.tick(now)
        return due

    def members_changed(self, changed: Collection[int]) -> list[Completion]:
        """Tell the parts that wait for other workers who takes part now, and whose part has ``changed``."""
        due: list[Completion] = []
        for shard in self.shards.values():
            due += shard.update_members(self.members.living, changed)
        return due

    def replace(self, message: Join, now: float) -> list[Completion]:
        """Have another process replace a worker that has died or is silent."""
        due = self.collectives.replace(message.worker, message.process, now)
        for shard in self.shards.values():
            shard.forget(message.worker, replaced=True)
        self.have_weights.discard(message.worker)
        self.buffers.forget(message.worker)
        return due

    def joined(self, worker: int, *, late: bool) -> Joined:
        """The answer to a worker that has joined."""
        pushed = max((shard.latest_push.get(worker, 0) for shard in self.shards.values()), default=0)
        incarnation = self.members.incarnations.get(worker, 0)
        return Joined(0, incarnation, pushed, late, self.collectives.completed if late else 0)

    def forget(self, worker: int) -> None:
        """Keep nothing for a worker that has left permanently."""
        if self.members.elastic:  # otherwise a long run would remember every worker that ever joined
            self.members.metrics.pop(worker, None)
            for shard in self.shards.values():
                shard.forget(worker)
            self.have_weights.discard(worker)
        else:  # what it has pushed must be known if it is replaced
            for shard in self.shards.values():
                shard.forget(worker, replaced=True)
        self.buffers.forget(worker)

    def close(self) -> None:
        """Release the memory of its exchanges."""
        self.buffers.clear()
