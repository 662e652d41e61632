"""Talking to the servers: one method per message, answers checked, errors turned back into exceptions."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.algorithms import Algorithm
from lightning_asgd.codec_streams import Coded
from lightning_asgd.compression import Compression
from lightning_asgd.errors import (
    CollectiveTimeoutError,
    ProtocolError,
    ServerLostError,
    WorkerAwayError,
    WorkerLostError,
)
from lightning_asgd.layout import Layout
from lightning_asgd.protocol import (
    Attach,
    Attached,
    Contribution,
    DisconnectWatch,
    Epoch,
    Exchange,
    Failure,
    Heartbeat,
    HeartbeatReply,
    InitShard,
    Join,
    Joined,
    LayerGradient,
    LeaseGrant,
    LeaseHoldings,
    LeaseRequest,
    Leave,
    OpenEpoch,
    Pickled,
    Policy,
    ReplayDone,
    ReplicaState,
    Reply,
    RunMetadata,
    Samples,
    ShardState,
    SharedRef,
    StateReport,
    WorkerMetrics,
)
from lightning_asgd.worker.connection import COORDINATOR, GRACE_S, Connection, done_within

__all__ = ["Client"]

_FOREVER_S = 0.0  # for a transport: no time-out


class Client:
    """A worker's side of one session.

    Args:
        connection: to the servers.
        policy: what the session does about workers that are silent or gone.
        after: the session that this one goes on from.
    """

    def __init__(self, connection: Connection, *, policy: Policy | None = None, after: str = "") -> None:
        self.connection = connection
        self._policy = policy or Policy()
        self._after = after
        self._collectives = 0
        self._stopped = 0  # number of the latest collective in which a stopped worker is known to wait
        self._exchanges: dict[int, list[Exchange]] = {}  # by fragment, the latest one's messages
        # Collectives that were answered, by number, and the answers: the latest, and those that others may need yet.
        self._answers: dict[int, tuple[Contribution, dict[int, Any]]] = {}
        self._term = [0] * connection.transport.num_servers  # how often each server had declared this worker away
        self._terms: list[dict[int, int]] = [{} for _ in self._term]  # and others, as far as is known
        self._left: list[dict[int, str]] = [{} for _ in self._term]  # who each says is gone
        # In a run whose workers come and go, as far as is known:
        self._heard = HeartbeatReply()  # who takes part
        self._pushers: list[set[int]] = [set() for _ in self._term]  # whose pushes each server's weights hold
        self._notes: dict[str, Any] = {}
        self.replayed = False
        """Whether a server had not taken part of a push that the coordinator took: then this worker must come back."""

    def join(self, *, again: bool = False, server: int | None = None) -> None:
        """Enter the session on every server.

        Args:
            again: whether this worker was told that it counts as away.
            server: the only one to join; None for all.

        Raises:
            ProtocolError: a server refuses this worker; the message says why.
            WorkerLostError: the worker was declared gone, or the session was ended.
            ServerLostError: a server does not answer.
        """
        about = (
            self.connection.session,
            self.connection.worker,
            self.connection.world_size,
            self._policy,
            again,
            self._after,
        )
        for s in self.connection.servers if server is None else [server]:
            joined: Joined = self.connection.ask(s, Join(*about, s))
            self._term[s] = joined.incarnation

    def attach(self, about: str) -> Attached:
        """Enter a run whose workers come and go. Waits while another worker brings its weights.

        Args:
            about: what this worker is, for people.

        Raises:
            ProtocolError: a server refuses this worker; the message says why.
            ServerLostError: a server does not answer.
        """
        message = Attach(self.connection.session, about, self._policy)
        future = self.connection.post(COORDINATOR, message, self.connection.patience_s + GRACE_S)
        attached: Attached = self.connection.result(COORDINATOR, future, self.connection.patience_s)
        self.connection.worker, self._notes = attached.worker, dict(attached.notes)
        self.hear(self.connection.ask(COORDINATOR, Heartbeat(*self.connection.sender)))
        for server in self.connection.servers:
            if server != COORDINATOR:
                self.join(server=server)
        return replace(attached, notes={name: self._read(value) for name, value in attached.notes.items()})

    def note(self, name: str, value: Any = None, *, first: bool = False) -> Any:
        """Tell the other workers of the run something, also those that come later.

        Args:
            name: what it is about.
            value: any picklable value; None to ask only.
            first: whether what was said before counts, if anything was.

        Returns:
            what counts now.
        """
        message = RunMetadata(*self.connection.sender, name, None if value is None else _closed(value), first)
        noted = self.connection.ask(COORDINATOR, message)
        if noted is not None:
            self._notes[name] = noted
        return self._read(noted)

    def _read(self, value: Any) -> Any:
        return _opened("another worker", value)

    def beat(self, heard: int, timeout_s: float, figures: WorkerMetrics | None = None) -> HeartbeatReply | None:
        """Give all servers a sign of life. One that does not answer is not this method's business.

        Args:
            heard: number of news heard of before.
            timeout_s: seconds to wait for the coordinator's answer.
            figures: this worker's latest, for the coordinator.

        Returns:
            what the coordinator says; None if it does not answer in time.

        Raises:
            WorkerLostError: the session was ended for want of a worker.
        """
        beaten: HeartbeatReply | None = None
        for server in self.connection.servers:
            try:
                sign = Heartbeat(*self.connection.sender, heard, figures if server == COORDINATOR else None)
                if (
                    server in self.connection.transport.prepared
                ):  # this worker may be busy for long before it joins there
                    self.connection.transport.call_prepared(
                        server, Heartbeat(*self.connection.sender), self.connection.timeout_s
                    )
                if server in self.connection.gone:
                    continue
                future = self.connection.transport.call(server, sign, self.connection.timeout_s)
                answer = future.wait() if server == COORDINATOR and done_within(future, timeout_s) else None
            except (RuntimeError, KeyError):  # replaced just now
                continue
            if isinstance(answer, Failure) and answer.error == WorkerLostError.__name__:
                raise WorkerLostError(answer.message)
            if isinstance(answer, HeartbeatReply):
                beaten = answer
                self.hear(answer)
        return beaten

    def hear(self, beaten: HeartbeatReply) -> None:
        """Take notice of who takes part, where workers come and go: a server in a lost one's place is told."""
        self._heard = beaten

    def initialise(
        self,
        layout: Layout,
        algorithm: Algorithm,
        shared: Sequence[SharedRef | None],
        weights: Sequence[tuple[Tensor, ...]] | None = None,
        versions: Sequence[int] | None = None,
        fragment: int = 0,
        compression: Compression | None = None,
    ) -> list[bool]:
        """Lay out the shards, and fill them if ``weights`` are given.

        Args:
            layout: what lives where.
            algorithm: what the servers do with updates.
            shared: a block per server, or None.
            weights: per server, one tensor per group.
            versions: per server, the version to count on from.
            fragment: number of the part of the module.
            compression: code of what is sent by value.

        Returns:
            per server, whether it can see the shared block.
        """
        messages = [
            InitShard(
                self.connection.session,
                self.connection.worker,
                layout.shard(s),
                algorithm,
                None if weights is None else weights[s],
                0 if versions is None else versions[s],
                shared[s],
                fragment,
                compression,
            )
            for s in self.connection.servers
        ]
        # The coordinator knows whether these are to be a run's weights: no other server takes them before it has.
        first = bool(self.connection.result(COORDINATOR, self.connection.post(COORDINATOR, messages[COORDINATOR])))
        futures = [self.connection.post(s, messages[s]) for s in self.connection.servers if s != COORDINATOR]
        return [first, *(bool(self.connection.result(s, future)) for s, future in enumerate(futures, COORDINATOR + 1))]

    def exchange(
        self,
        seq: int,
        base_versions: Sequence[int],
        *,
        push: bool,
        fetch: bool,
        updates: Sequence[tuple[Coded, ...] | None],
        common: Sequence[str] | None = None,
        **about: Any,
    ) -> list[Future[Any]]:
        """Start an exchange with every server: one message each.

        Args:
            seq: number of the push, counted from 1.
            base_versions: per server, the version the update is based on.
            push: send an update.
            fetch: ask for the weights.
            updates: per server, the update by value, or None if it lies in the shared block.
            common: at a sync point, per server the name of the weights that this worker holds of the last one.
            **about: the other fields of :class:`Exchange`.

        Returns:
            futures for :meth:`replies`.
        """
        messages = [
            Exchange(
                self.connection.session,
                self.connection.worker,
                seq,
                base_versions[s],
                push,
                fetch,
                updates[s] if push else None,
                shared=updates[s] is None,
                common=None if common is None else common[s],
                **about,
            )
            for s in self.connection.servers
        ]
        self._exchanges[messages[0].fragment] = messages
        return [self.connection.post(s, message) for s, message in zip(self.connection.servers, messages, strict=True)]

    def gradient(self, server: int, phase: int, step: int, layer: int, gradient: Tensor | None) -> Future[Any]:
        """Send one layer's gradient; see :class:`LayerGradient`.

        Returns:
            a future for :meth:`answer`.
        """
        return self.connection.post(server, LayerGradient(*self.connection.sender, phase, step, layer, gradient))

    def replies(self, futures: list[Future[Any]], fragment: int = 0) -> list[Reply]:
        """Wait for an exchange's answers.

        The coordinator decides whether a push is applied: where it did and another server refused this worker as away,
        the message is sent there again. Those lose patience sooner, so that it is hardly ever the other way round.

        Args:
            futures: what :meth:`exchange` returned; that of a message that is sent again takes its place.
            fragment: number of the part of the module.

        Raises:
            ServerLostError: a server is gone or does not answer.
            WorkerAwayError: the others have gone on without this worker.
            ASGDError: what a server reported.
        """
        while True:
            restored = list(self.connection.restored)
            replies = [self._reply(server, futures, fragment) for server in self.connection.servers]
            if restored == self.connection.restored:  # else the answer of one that was lost is worth nothing
                return replies

    def _reply(self, server: int, futures: list[Future[Any]], fragment: int) -> Reply:
        while True:
            restored, future = self.connection.restored[server], futures[server]
            try:
                reply: Reply = self.connection.result(server, future)
                self._terms[server] |= reply.incarnations
                self._left[server] |= reply.left
                self._stopped = max(self._stopped, reply.stopped)
                self._pushers[server] = set(reply.pushes) or self._pushers[server]
                return reply
            except WorkerAwayError:
                if server == COORDINATOR:
                    raise
                self.join(again=True, server=server)
                self.replayed = True
                futures[server] = self.replay(server, self.latest(fragment)[server])
            except ServerLostError as error:
                self.connection.recover(server, restored, error)
                if futures[server] is future:
                    futures[server] = self.replay(server, self.latest(fragment)[server])

    def latest(self, fragment: int = 0) -> list[Exchange]:
        """The messages of the latest exchange, per server."""
        return self._exchanges[fragment]

    def replay(self, server: int, message: Exchange) -> Future[Any]:
        """Send an exchange's message to a server again.

        Returns:
            a future for :meth:`answer`.
        """
        return self.connection.post(server, message)

    def state(self, fragment: int = 0, states: Sequence[Any] | None = None) -> list[Any]:
        """What the servers keep beside the weights; or, given that, put it back.

        Args:
            fragment: number of the part of the module.
            states: per server, what was returned when a checkpoint was written; None to ask.
        """
        messages = [
            ShardState(*self.connection.sender, fragment, None if states is None else states[s])
            for s in self.connection.servers
        ]
        return [self.connection.ask(s, message) for s, message in zip(self.connection.servers, messages, strict=True)]

    def samples(self) -> list[tuple[int, list[tuple[Tensor, ...]]]]:
        """Fetch the copies of the weights that the algorithm had the servers keep.

        Returns:
            versions that every server has a copy of, oldest first; with each, per server one tensor per group.
        """
        futures = [self.connection.post(s, Samples(*self.connection.sender)) for s in self.connection.servers]
        kept = [dict(self.connection.result(s, future)) for s, future in enumerate(futures)]
        common = set(kept[0]).intersection(*kept[1:])
        return [(version, [shard[version] for shard in kept]) for version in sorted(common)]

    def open_epoch(self, epoch: Epoch) -> tuple[tuple[int, int], ...]:
        """Begin an epoch whose units workers claim, or look how far it is.

        Returns:
            ranges of units whose updates have been applied.

        Raises:
            ProtocolError: the others have another epoch in mind.
        """
        done: tuple[tuple[int, int], ...] = self.connection.ask(COORDINATOR, OpenEpoch(*self.connection.sender, epoch))
        return done

    def claim(
        self,
        key: str,
        segment: int,
        trained: int,
        applied: int,
        pace: float,
        rtt_s: float,
        *,
        timeout_s: float | None = None,
        **about: Any,
    ) -> Future[Any]:
        """Ask for units of an epoch; see :class:`LeaseRequest`.

        Args:
            key: see there, as the next five.
            segment: see there.
            trained: see there.
            applied: see there.
            pace: see there.
            rtt_s: see there.
            timeout_s: seconds to wait for an answer that depends on other workers; None for one that does not.
            **about: the other fields of :class:`LeaseRequest`.

        Returns:
            a future for :meth:`granted`.
        """
        message = LeaseRequest(*self.connection.sender, key, segment, trained, applied, pace, rtt_s, **about)
        return self.connection.post(COORDINATOR, message, None if timeout_s is None else timeout_s + GRACE_S)

    def granted(self, future: Future[Any], timeout_s: float | None = None) -> LeaseGrant:
        """Wait for the answer to a claim.

        Args:
            future: what :meth:`claim` returned.
            timeout_s: what it was given.

        Returns:
            what is granted. If the time is up: nothing, and the segment counts as over.
        """
        if timeout_s is not None and not self.connection.wait(future, timeout_s):
            return LeaseGrant(over=True)
        grant: LeaseGrant = self.connection.result(COORDINATOR, future)
        self._terms[COORDINATOR] |= grant.incarnations
        self._left[COORDINATOR] |= grant.left
        return grant

    def collective(
        self,
        kind: str,
        name: str,
        payload: Any = None,
        *,
        source: int | None = None,
        target: int | None = None,
        stops: bool = False,
        timeout_s: float,
    ) -> dict[int, Any]:
        """Take part in a collective and wait for the others.

        Args:
            kind: what it is, equal on all workers.
            name: what for, equal on all workers.
            payload: this worker's value.
            source: the only worker whose value is wanted; None for everybody's.
            target: the only worker that wants them; None for everybody.
            stops: whether this worker trains no more: the others are to come soon.
            timeout_s: seconds to wait for the missing workers.

        Returns:
            values by rank, of the living workers.

        Raises:
            CollectiveMismatchError: the workers do not agree what they are doing.
            CollectiveTimeoutError: somebody is missing.
            WorkerLostError: a worker that is needed is gone.
            ServerLostError: the coordinator is gone.
        """
        self._collectives += 1
        message = Contribution(
            self.connection.session,
            self.connection.worker,
            self._collectives,
            kind,
            name,
            _closed(payload),
            source,
            target,
            timeout_s,
            stops,
        )
        limit = timeout_s + GRACE_S
        while True:
            restored = self.connection.restored[COORDINATOR]
            try:
                future = self.connection.post(COORDINATOR, message, limit)
                if not self.connection.wait(future, limit):
                    raise CollectiveTimeoutError(
                        f"{kind} {name!r} of worker {message.worker} was not answered within {limit:g} s by "
                        f"server {COORDINATOR}. Expected an answer or an error in time: the server hangs. Stop the job "
                        "and look at its machine."
                    )
                values: dict[int, Any] = self.connection.result(COORDINATOR, future)
            except ServerLostError as error:
                self.connection.recover(COORDINATOR, restored, error)
            else:
                self._remember(message, values)
                return {rank: _opened(f"worker {rank}", value) for rank, value in values.items()}

    @property
    def others_stopped(self) -> bool:
        """Whether another worker trains no more, and waits in this one's next collective."""
        return self._stopped > self._collectives

    def _remember(self, message: Contribution, answer: dict[int, Any]) -> None:
        """Keep what a collective came to, for those who need it yet if the coordinator is lost."""
        for seq, (earlier, _) in list(self._answers.items()):
            if self.connection.restorer is None or seq < self._heard.needed:
                del self._answers[seq]
            elif earlier.target is not None:  # that one has its answer, and the others get nothing
                self._answers[seq] = replace(earlier, payload=None), {}
        if message.target is None:
            message = replace(message, payload=None)  # the answer has it
        self._answers[message.seq] = message, answer

    def leave(self, reason: str = "", worker: int | None = None) -> None:
        """Leave the session on every server, or report that another worker's process is gone.

        A lost server is ignored.
        """
        gone = self.connection.worker if worker is None else worker
        for s in self.connection.servers:
            try:
                message = Leave(self.connection.session, gone, reason, final=worker is not None)
                future = self.connection.transport.call(s, message, self.connection.timeout_s)
                done_within(future, 5.0)
            except RuntimeError:  # the server is gone too: nothing to leave
                continue

    # ------------------------------------------------------------------ servers that are lost

    def watch(self, server: int) -> Future[Any]:
        """Have a future that fails as soon as a server is lost, and is done when the session ends."""
        return self.connection.post(server, DisconnectWatch(*self.connection.sender), _FOREVER_S)

    def join_restored(self, server: int) -> None:
        """Enter the session on a server that takes the place of one that was lost.

        Raises:
            ServerLostError: it does not answer.
            WorkerLostError: the session is over.
        """
        holding: Collection[int] = () if self.connection.world_size else self._holding()
        about = (
            self.connection.session,
            self.connection.worker,
            self.connection.world_size,
            self._policy,
            False,
            self._after,
            server,
            True,
        )
        self.connection.result(
            server, self.connection.post(server, Join(*about, tuple(sorted(holding)), self._heard.admitted))
        )

    def _holding(self) -> set[int]:
        """Workers that may have pushed: a server that was restored without one of them could lack half a push.

        Servers that live know who has just come, since everybody fetches from all before the first push. Where none
        does, what others may have pushed and this worker has not heard of is in no weights that are offered.
        """
        holding: set[int] = set()
        for server in set(self.connection.servers) - self.connection.being_restored:
            beaten: HeartbeatReply = self.connection.result(
                server, self.connection.post(server, Heartbeat(*self.connection.sender))
            )
            holding.update(beaten.holding)
            if server == COORDINATOR:
                self.hear(beaten)
        heard = self._heard
        holding.update(heard.holding, [self.connection.worker])
        pushers = set().union(*self._pushers)
        return holding | {worker for worker in pushers if worker in heard.living or worker > heard.admitted}

    def allocate(self, server: int, message: InitShard) -> bool:
        """Lay out a shard on one server; see :meth:`initialise`."""
        return bool(self.connection.result(server, self.connection.post(server, message)))

    def offer(self, shards: Mapping[int, Sequence[ReplicaState]], part: LeaseHoldings | None) -> None:
        """Tell servers what their predecessors knew, and wait until all workers have told.

        Args:
            shards: per server, what this worker holds.
            part: of the present epoch, for the coordinator.

        Raises:
            ServerLostError: one does not answer.
            WorkerAwayError: the others have gone on without this worker.
        """
        answered, session = max(self._answers, default=0), self.connection.session
        self.connection.ask_together(
            {
                s: StateReport(
                    session,
                    self.connection.worker,
                    tuple(held),
                    answered,
                    part if s == COORDINATOR else None,
                    self._term[s],
                    self._terms[s],
                    self._left[s],
                    self._notes if s == COORDINATOR else {},
                )
                for s, held in shards.items()
            }
        )

    def check_trusted(self) -> None:
        """Ask the first server, whose word counts, whether it has gone on without this worker: others may not know.

        Raises:
            WorkerAwayError: it has.
        """
        beaten: HeartbeatReply = self.connection.result(
            COORDINATOR, self.connection.post(COORDINATOR, Heartbeat(*self.connection.sender))
        )
        if beaten.fenced:
            raise WorkerAwayError(f"Worker {self.connection.worker} was away. Expected it to join again.")

    def repeat(self) -> None:
        """Send the part in collectives again that were answered here, and may not have been elsewhere."""
        for message, answer in self._answers.values():
            self.connection.post(COORDINATOR, replace(message, answer=answer), message.timeout_s + GRACE_S)

    def settle(self, servers: Collection[int]) -> None:
        """Wait until all have sent again what restored servers had not got."""
        self.connection.ask_together({s: ReplayDone(*self.connection.sender) for s in servers})


def _closed(value: Any) -> Any:
    """What a worker gives into a collective: servers open no objects, since they may lack the classes."""
    plain = value is None or isinstance(value, bool | int | float | str | bytes | Tensor)
    return value if plain else Pickled(pickle.dumps(value))


def _opened(maker: str, value: Any) -> Any:
    """The same for the other workers, who trust each other."""
    if not isinstance(value, Pickled):
        return value
    try:
        return pickle.loads(value.data)
    except Exception as error:
        raise ProtocolError(
            f"An object of {maker} could not be read: {error!r}. Expected its class and module to be the same "
            "on every worker."
        ) from error
