"""Talking to the servers: one method per message, answers checked, errors turned back into exceptions."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from lightning_asgd.algorithms import Algorithm
from lightning_asgd.codec_streams import Coded
from lightning_asgd.compression import Compression
from lightning_asgd.errors import (
    ASGDError,
    CollectiveTimeoutError,
    ProtocolError,
    ServerLostError,
    WorkerAwayError,
    WorkerLostError,
    error_from,
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
from lightning_asgd.transports.transport import TIMED_OUT, Transport

__all__ = ["COORDINATOR", "AnotherLost", "Client", "done_within"]

COORDINATOR = 0  # index of the server that coordinates
_FOREVER_S = 0.0  # for a transport: no time-out
_GRACE_S = 30.0  # how much longer a worker waits for an answer that the coordinator itself limits in time


class Restorer(Protocol):
    """Restores servers that were lost."""

    def restore(self, servers: Collection[int]) -> None:
        """Do so; called by the training thread."""

    def watch(self, server: int) -> None:
        """Have the training thread interrupted when a server is lost."""


class AnotherLost(Exception):
    """Another server was lost while some were being restored: begin again with all of them."""


class Client:
    """A worker's side of one session.

    Args:
        transport: connection to the servers.
        session: name of the session.
        worker: this worker's global rank.
        world_size: number of workers; 0 in a run whose workers come and go: then :meth:`attach` gives it its number.
        timeout_s: seconds for a server to answer anything but a collective.
        patience_s: seconds to wait for the other workers when servers are restored.
        policy: what the session does about workers that are silent or gone.
        after: the session that this one goes on from.
    """

    def __init__(
        self,
        transport: Transport,
        session: str,
        worker: int,
        world_size: int,
        *,
        timeout_s: float = 300.0,
        patience_s: float = 1800.0,
        policy: Policy | None = None,
        after: str = "",
    ) -> None:
        self.transport = transport
        self.session = session
        self.worker = worker
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._patience_s = patience_s
        self._policy = policy or Policy()
        self._after = after
        self._collectives = 0
        self._stopped = 0  # number of the latest collective in which a stopped worker is known to wait
        self._exchanges: dict[int, list[Exchange]] = {}  # by fragment, the latest one's messages
        # Collectives that were answered, by number, and the answers: the latest, and those that others may need yet.
        self._answers: dict[int, tuple[Contribution, dict[int, Any]]] = {}
        self._term = [0] * transport.num_servers  # how often each server had declared this worker away
        self._terms: list[dict[int, int]] = [{} for _ in self._term]  # and others, as far as is known
        self._left: list[dict[int, str]] = [{} for _ in self._term]  # who each says is gone
        self._lost_servers: set[int] = set()  # that are to be restored
        self._being_restored: set[int] = set()
        self.gone: set[int] = set()
        """Servers that are lost, and that no other one has been joined in the place of."""
        self._interrupt: Future[None] | None = None  # ends the present wait
        # In a run whose workers come and go, as far as is known:
        self._heard = HeartbeatReply()  # who takes part
        self._pushers: list[set[int]] = [set() for _ in self._term]  # whose pushes each server's weights hold
        self._notes: dict[str, Any] = {}
        self.restorer: Restorer | None = None
        """None where lost servers cannot be restored."""
        self.restored = [0] * transport.num_servers
        """How often each server was restored."""
        self.replayed = False
        """Whether a server had not taken part of a push that the coordinator took: then this worker must come back."""

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return self.transport.num_servers

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
        about = (self.session, self.worker, self.world_size, self._policy, again, self._after)
        for s in self._servers() if server is None else [server]:
            joined: Joined = self._ask(s, Join(*about, s))
            self._term[s] = joined.incarnation

    def attach(self, about: str) -> Attached:
        """Enter a run whose workers come and go. Waits while another worker brings its weights.

        Args:
            about: what this worker is, for people.

        Raises:
            ProtocolError: a server refuses this worker; the message says why.
            ServerLostError: a server does not answer.
        """
        message = Attach(self.session, about, self._policy)
        future = self._send(COORDINATOR, message, self._patience_s + _GRACE_S)
        attached: Attached = self.answer(COORDINATOR, future, self._patience_s)
        self.worker, self._notes = attached.worker, dict(attached.notes)
        self.hear(self._ask(COORDINATOR, Heartbeat(self.session, self.worker)))
        for server in self._servers():
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
        message = RunMetadata(self.session, self.worker, name, None if value is None else _closed(value), first)
        noted = self._ask(COORDINATOR, message)
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
        for server in self._servers():
            try:
                sign = Heartbeat(self.session, self.worker, heard, figures if server == COORDINATOR else None)
                if server in self.transport.prepared:  # this worker may be busy for long before it joins there
                    self.transport.call_prepared(server, Heartbeat(self.session, self.worker), self.timeout_s)
                if server in self.gone:
                    continue
                future = self.transport.call(server, sign, self.timeout_s)
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
                self.session,
                self.worker,
                layout.shard(s),
                algorithm,
                None if weights is None else weights[s],
                0 if versions is None else versions[s],
                shared[s],
                fragment,
                compression,
            )
            for s in self._servers()
        ]
        # The coordinator knows whether these are to be a run's weights: no other server takes them before it has.
        first = bool(self.answer(COORDINATOR, self._send(COORDINATOR, messages[COORDINATOR])))
        futures = [self._send(s, messages[s]) for s in self._servers() if s != COORDINATOR]
        return [first, *(bool(self.answer(s, future)) for s, future in enumerate(futures, COORDINATOR + 1))]

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
                self.session,
                self.worker,
                seq,
                base_versions[s],
                push,
                fetch,
                updates[s] if push else None,
                shared=updates[s] is None,
                common=None if common is None else common[s],
                **about,
            )
            for s in self._servers()
        ]
        self._exchanges[messages[0].fragment] = messages
        return [self._send(s, message) for s, message in zip(self._servers(), messages, strict=True)]

    def gradient(self, server: int, phase: int, step: int, layer: int, gradient: Tensor | None) -> Future[Any]:
        """Send one layer's gradient; see :class:`LayerGradient`.

        Returns:
            a future for :meth:`answer`.
        """
        return self._send(server, LayerGradient(self.session, self.worker, phase, step, layer, gradient))

    def answer(self, server: int, future: Future[Any], seconds: float | None = None) -> Any:
        """Wait for a server's answer.

        Args:
            server: which one.
            future: of its answer.
            seconds: how long; None for as long as any exchange may take.

        Raises:
            ServerLostError: the server is gone or does not answer.
            ASGDError: what it reported.
        """
        seconds = self.timeout_s if seconds is None else seconds
        if not self._done_within(future, seconds + _GRACE_S):
            raise ServerLostError(
                f"Server {server} did not answer worker {self.worker} within {seconds:g} s. "
                "Expected it to. Look at its machine and the network, or raise timeouts.exchange_s."
            )
        return self._value(server, future)

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
            restored = list(self.restored)
            replies = [self._reply(server, futures, fragment) for server in self._servers()]
            if restored == self.restored:  # else the answer of one that was lost is worth nothing
                return replies

    def _reply(self, server: int, futures: list[Future[Any]], fragment: int) -> Reply:
        while True:
            restored, future = self.restored[server], futures[server]
            try:
                reply: Reply = self.answer(server, future)
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
                self.recover(server, restored, error)
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
        return self._send(server, message)

    def state(self, fragment: int = 0, states: Sequence[Any] | None = None) -> list[Any]:
        """What the servers keep beside the weights; or, given that, put it back.

        Args:
            fragment: number of the part of the module.
            states: per server, what was returned when a checkpoint was written; None to ask.
        """
        messages = [
            ShardState(self.session, self.worker, fragment, None if states is None else states[s])
            for s in self._servers()
        ]
        return [self._ask(s, message) for s, message in zip(self._servers(), messages, strict=True)]

    def samples(self) -> list[tuple[int, list[tuple[Tensor, ...]]]]:
        """Fetch the copies of the weights that the algorithm had the servers keep.

        Returns:
            versions that every server has a copy of, oldest first; with each, per server one tensor per group.
        """
        kept = [
            dict(s)
            for s in self._wait_all([self._send(s, Samples(self.session, self.worker)) for s in self._servers()])
        ]
        common = set(kept[0]).intersection(*kept[1:])
        return [(version, [shard[version] for shard in kept]) for version in sorted(common)]

    def open_epoch(self, epoch: Epoch) -> tuple[tuple[int, int], ...]:
        """Begin an epoch whose units workers claim, or look how far it is.

        Returns:
            ranges of units whose updates have been applied.

        Raises:
            ProtocolError: the others have another epoch in mind.
        """
        done: tuple[tuple[int, int], ...] = self._ask(COORDINATOR, OpenEpoch(self.session, self.worker, epoch))
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
        message = LeaseRequest(self.session, self.worker, key, segment, trained, applied, pace, rtt_s, **about)
        return self._send(COORDINATOR, message, None if timeout_s is None else timeout_s + _GRACE_S)

    def granted(self, future: Future[Any], timeout_s: float | None = None) -> LeaseGrant:
        """Wait for the answer to a claim.

        Args:
            future: what :meth:`claim` returned.
            timeout_s: what it was given.

        Returns:
            what is granted. If the time is up: nothing, and the segment counts as over.
        """
        if timeout_s is not None and not self._done_within(future, timeout_s):
            return LeaseGrant(over=True)
        grant: LeaseGrant = self.answer(COORDINATOR, future)
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
            self.session, self.worker, self._collectives, kind, name, _closed(payload), source, target, timeout_s, stops
        )
        limit = timeout_s + _GRACE_S
        while True:
            restored = self.restored[COORDINATOR]
            try:
                future = self._send(COORDINATOR, message, limit)
                if not self._done_within(future, limit):
                    raise CollectiveTimeoutError(
                        f"{kind} {name!r} of worker {self.worker} was not answered within {limit:g} s by server "
                        f"{COORDINATOR}. Expected an answer or an error in time: the server hangs. Stop the job and "
                        "look at its machine."
                    )
                values: dict[int, Any] = self._value(COORDINATOR, future)
            except ServerLostError as error:
                self.recover(COORDINATOR, restored, error)
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
            if self.restorer is None or seq < self._heard.needed:
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
        gone = self.worker if worker is None else worker
        for s in self._servers():
            try:
                message = Leave(self.session, gone, reason, final=worker is not None)
                future = self.transport.call(s, message, self.timeout_s)
                done_within(future, 5.0)
            except RuntimeError:  # the server is gone too: nothing to leave
                continue

    # ------------------------------------------------------------------ servers that are lost

    def watch(self, server: int) -> Future[Any]:
        """Have a future that fails as soon as a server is lost, and is done when the session ends."""
        return self._send(server, DisconnectWatch(self.session, self.worker), _FOREVER_S)

    def interrupt(self, server: int) -> None:
        """Have the training thread restore a server as soon as it waits for one, or :meth:`attend`. From any thread."""
        self._lost_servers.add(server)
        interrupt = self._interrupt
        if interrupt is not None:
            _set(interrupt)

    def attend(self) -> None:
        """Restore the servers that are lost, if any are. To be called between two batches."""
        if self._lost_servers and not self._being_restored:
            self._restore()

    @property
    def restoring(self) -> bool:
        """Whether servers are being restored now."""
        return bool(self._being_restored)

    @property
    def may_lack(self) -> list[int]:
        """Servers that are being restored, and may not have what the coordinator has answered."""
        return [] if COORDINATOR in self._being_restored else sorted(self._being_restored)

    def recover(self, server: int, restored: int, error: ServerLostError) -> None:
        """Have a server restored after an error, unless that has happened.

        Args:
            server: which one.
            restored: how often it had been when the message was sent that came to nothing.
            error: raised if it cannot be.
        """
        if self.restorer is None or self._being_restored or error.server is None:
            raise error
        if self.restored[server] == restored:
            self._lost_servers.add(server)
            self._restore()

    def _restore(self) -> None:
        while self._lost_servers and self.restorer is not None:
            servers = self._being_restored = set(self._lost_servers)
            try:
                self.restorer.restore(servers)
            except AnotherLost:
                continue
            finally:
                self._being_restored = set()
            self._lost_servers -= servers
            for server in servers:
                self.restored[server] += 1
                self.restorer.watch(server)

    def join_restored(self, server: int) -> None:
        """Enter the session on a server that takes the place of one that was lost.

        Raises:
            ServerLostError: it does not answer.
            WorkerLostError: the session is over.
        """
        holding: Collection[int] = () if self.world_size else self._holding()
        about = (self.session, self.worker, self.world_size, self._policy, False, self._after, server, True)
        self.answer(server, self._send(server, Join(*about, tuple(sorted(holding)), self._heard.admitted)))

    def _holding(self) -> set[int]:
        """Workers that may have pushed: a server that was restored without one of them could lack half a push.

        Servers that live know who has just come, since everybody fetches from all before the first push. Where none
        does, what others may have pushed and this worker has not heard of is in no weights that are offered.
        """
        holding: set[int] = set()
        for server in set(self._servers()) - self._being_restored:
            beaten: HeartbeatReply = self.answer(server, self._send(server, Heartbeat(self.session, self.worker)))
            holding.update(beaten.holding)
            if server == COORDINATOR:
                self.hear(beaten)
        heard = self._heard
        holding.update(heard.holding, [self.worker])
        pushers = set().union(*self._pushers)
        return holding | {worker for worker in pushers if worker in heard.living or worker > heard.admitted}

    def allocate(self, server: int, message: InitShard) -> bool:
        """Lay out a shard on one server; see :meth:`initialise`."""
        return bool(self.answer(server, self._send(server, message)))

    def offer(self, shards: Mapping[int, Sequence[ReplicaState]], part: LeaseHoldings | None) -> None:
        """Tell servers what their predecessors knew, and wait until all workers have told.

        Args:
            shards: per server, what this worker holds.
            part: of the present epoch, for the coordinator.

        Raises:
            ServerLostError: one does not answer.
            WorkerAwayError: the others have gone on without this worker.
        """
        answered = max(self._answers, default=0)
        about = {s: (tuple(held), answered, part if s == COORDINATOR else None) for s, held in shards.items()}
        others = {s: (self._term[s], self._terms[s], self._left[s]) for s in shards}
        notes = {s: self._notes if s == COORDINATOR else {} for s in shards}
        self._ask_together({s: StateReport(self.session, self.worker, *about[s], *others[s], notes[s]) for s in shards})

    def check_trusted(self) -> None:
        """Ask the first server, whose word counts, whether it has gone on without this worker: others may not know.

        Raises:
            WorkerAwayError: it has.
        """
        beaten: HeartbeatReply = self.answer(COORDINATOR, self._send(COORDINATOR, Heartbeat(self.session, self.worker)))
        if beaten.fenced:
            raise WorkerAwayError(f"Worker {self.worker} was away. Expected it to join again.")

    def repeat(self) -> None:
        """Send the part in collectives again that were answered here, and may not have been elsewhere."""
        for message, answer in self._answers.values():
            self._send(COORDINATOR, replace(message, answer=answer), message.timeout_s + _GRACE_S)

    def settle(self, servers: Collection[int]) -> None:
        """Wait until all have sent again what restored servers had not got."""
        self._ask_together({s: ReplayDone(self.session, self.worker) for s in servers})

    # ------------------------------------------------------------------ helpers

    def _servers(self) -> range:
        return range(self.num_servers)

    def _send(self, server: int, message: Any, timeout_s: float | None = None) -> Future[Any]:
        try:
            return self.transport.call(server, message, self.timeout_s if timeout_s is None else timeout_s)
        except ASGDError:  # the message cannot be sent
            raise
        except RuntimeError as error:
            raise self._lost(server, error) from error

    def _ask(self, server: int, message: Any) -> Any:
        """Send what may be sent again, and wait for the answer."""
        while True:
            restored = self.restored[server]
            try:
                return self.answer(server, self._send(server, message))
            except ServerLostError as error:
                self.recover(server, restored, error)

    def _ask_together(self, messages: Mapping[int, Any]) -> None:
        """Send a message to each server, and wait for answers that depend on the other workers."""
        limit = self._patience_s + _GRACE_S
        futures = {server: self._send(server, message, limit) for server, message in messages.items()}
        for server, future in futures.items():
            self.answer(server, future, self._patience_s)

    def _done_within(self, future: Future[Any], seconds: float) -> bool:
        """Wait; meanwhile restore servers that are lost, if that is possible."""
        if self.restorer is None:
            return done_within(future, seconds)
        while not future.done():
            self.attend()
            if self._being_restored and self._lost_servers - self._being_restored:
                raise AnotherLost
            either = self._interrupt = Future()
            future.add_done_callback(lambda _, either=either: _set(either))  # type: ignore[misc]
            if not self._lost_servers - self._being_restored and not done_within(either, seconds):
                return future.done()
        self._interrupt = None
        return True

    def _wait_all(self, futures: Sequence[Future[Any]]) -> list[Any]:
        return [self.answer(server, future) for server, future in enumerate(futures)]

    def _value(self, server: int, future: Future[Any]) -> Any:
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._lost(server, error) from error
        if isinstance(value, Failure):
            raise error_from(value.error, value.message)
        return value

    def _lost(self, server: int, error: Exception) -> ServerLostError:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        lost = ServerLostError(
            f"Server {server} is gone: worker {self.worker} got {cause!r} instead of an answer. "
            "Expected a running server. Its last output stands in the main process's error or log."
        )
        if TIMED_OUT not in cause:  # else it may live: no other one takes its place
            lost.server = server
        return lost


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


_setting = threading.Lock()


def _set(future: Future[None]) -> None:
    """Complete a future that several may want to complete."""
    with _setting:
        if not future.done():
            future.set_result(None)


def done_within(future: Future[Any], seconds: float) -> bool:
    """Wait without blocking signals, so that Ctrl-C ends the wait (``Future.wait`` would not return to Python)."""
    if future.done():
        return True
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event.wait(seconds) or future.done()
