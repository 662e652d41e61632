"""A simulated worker whose samples are leased: the real client of leases, called in the order of a training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.futures import Future

from lightning_asgd.core.foundation.errors import ASGDError
from lightning_asgd.core.foundation.validation import whole
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import Plan
from lightning_asgd.core.protocol import (
    BOOTSTRAPPED,
    Contribution,
    Epoch,
    Heartbeat,
    HeartbeatReply,
    JointReport,
    Leave,
    SyncReport,
)
from lightning_asgd.core.worker.connection import COORDINATOR
from lightning_asgd.core.worker.synchronizer import Training
from lightning_asgd.simulation.worker import Life, SimulatedWorker, Work


@dataclass(frozen=True)
class LeasedData:
    """Samples that all workers share in every epoch: each is leased to one of them.

    Args:
        samples: of an epoch.
        batch_size: samples of a worker's optimizer step.

    Raises:
        ConfigurationError: a value is no whole number of at least 1.
    """

    samples: int
    batch_size: int = 32

    def __post_init__(self) -> None:
        whole("LeasedData(samples)", self.samples)
        whole("LeasedData(batch_size)", self.batch_size)

    def plan(self, session: str, number: int) -> Plan:
        """An epoch, whose samples come in the order of their numbers."""
        epoch = Epoch(f"{session}/{number}", self.samples, (self.samples,), step=self.batch_size)
        return Plan(epoch, range(self.samples), self.batch_size)


class VirtualLeases(DataLeases):
    """A worker's leases in virtual time: where the client would block it yields the future that it waits for."""

    def find_more(self, acknowledged: Callable[[], int]) -> Life:
        """As :meth:`more`."""
        self._note(acknowledged())
        if not self._loading and not self._waiting:
            self._ask_early()
            if self._asked is not None:
                since = self._clock()
                yield [self._asked.future]
                self.granted_wait_s += self._clock() - since
        return self.more(acknowledged())

    def await_others(self, acknowledged: Callable[[], int]) -> Life:
        """As :meth:`wait`."""
        self._note(acknowledged())
        asked, since = self._ask(wait=True), self._clock()
        yield [asked.future]
        self.others_wait_s += self._clock() - since
        return self._has_waited(more=self._take(asked))

    def revoke(self) -> None:
        """Raise an error: the simulator's workers do not rejoin."""
        worker = self._client().connection.worker
        raise ASGDError(
            f"Worker {worker} was excluded after {self._clock():g} s, because the servers received its heartbeats too "
            "late. Expected servers that keep up with their messages: simulate fewer workers, more servers, longer "
            "steps or a larger silence_s."
        )


class LeasedWorker(SimulatedWorker):
    """One worker of a job or an elastic run, in virtual time.

    Attributes:
        data: what is trained; set from outside, as is what follows.
        first: number of its first epoch.
        number: number of its present epoch.
    """

    data: LeasedData
    first = number = 0
    _heard = 0  # events

    def _training(self) -> Training:
        self.leases = VirtualLeases(lambda: self._client, timeout_s=0.0, rejoin=self._excluded, clock=self._clock)
        return Training(self._heal, self._lr, self.leases)

    def _excluded(self) -> None:
        self.leases.revoke()

    @property
    def lease_wait_s(self) -> float:  # type: ignore[override]
        """Seconds in which it waited for leases, and for the others to train theirs."""
        return self.leases.granted_wait_s + self.leases.others_wait_s

    @property
    def _elastic(self) -> bool:
        return self._client.connection.world_size == 0

    def _enter(self) -> bool:
        if not self._elastic:
            return super()._enter()
        return self._client.attach("a simulated worker").bootstraps

    def announce(self) -> None:
        """Let others join the elastic run, which has weights now."""
        if self._elastic and BOOTSTRAPPED not in self._client.metadata:
            self._client.note(BOOTSTRAPPED, True)

    # ------------------------------------------------------------------ training

    def _epoch(self, number: int, work: Work) -> Life:
        """Train what is granted, until all of the epoch is trained."""
        leases, self.number = self.leases, number
        leases.batch = self.data.batch_size
        leases.open(self.data.plan(self._client.connection.session, number))
        yield from self.exchanger.begin()
        while (yield from self._has_more()):
            samples = leases.take()
            leases.begin_batch()
            yield from self._train(work, samples)
            if not leases.end_batch(self.stats.steps) and self.exchanger.moved:
                yield from self.exchanger.fetch()  # its update does not count

    def _has_more(self) -> Life:
        leases, exchanger = self.leases, self.exchanger
        if (yield from leases.find_more(self._acknowledged)):
            return True
        with leases.flushing():
            yield from exchanger.flush()
        if (yield from leases.await_others(self._acknowledged)):
            yield from exchanger.begin()
            return True
        return False

    def _acknowledged(self) -> int:
        return self.stats.steps - self.exchanger.unacknowledged

    def _sync_point(self, name: str) -> Life:
        """What :func:`synchronize` does; in an elastic run workers take the weights without meeting."""
        exchanger = self.exchanger
        yield from exchanger.flush()
        mine = SyncReport(exchanger.moved, should_stop=False, grown=False, checkpoints=None, trained=True)
        if self._elastic or (mine.moved and exchanger.final_once_pushed):
            yield from exchanger.fetch(park=True)
            mine = replace(mine, versions=tuple(exchanger.versions))
        if self._elastic:
            return
        met: JointReport = yield from self._reduced("sync point", name, mine, "report")
        if met.versions is None and met.moved:
            yield from exchanger.fetch(park=True)
            yield from self._reduced("barrier", f"{name}: all have the weights", False, "any")
        elif met.versions is not None and met.versions != mine.versions:
            yield from exchanger.fetch(park=True)
        self._problem.synchronise(met.workers)

    def _reduced(self, kind: str, name: str, payload: Any, how: str) -> Any:
        sender, seq = self._client.connection.sender, self._next_meeting()
        message = Contribution(*sender, seq, kind, name, payload, timeout_s=float("inf"), reduction=how)
        return (yield from self._contribute(message)).value

    # ------------------------------------------------------------------ membership

    def beat(self) -> None:
        """Send every server a heartbeat."""
        connection = self._client.connection
        for server in connection.servers:
            future = connection.post(server, Heartbeat(*connection.sender, self._heard))
            if server == COORDINATOR:
                future.add_done_callback(self._hear)

    def _hear(self, future: Future[Any]) -> None:
        answer = future.value()
        if isinstance(answer, HeartbeatReply):  # what it says of the others is for lost servers
            self._heard += len(answer.news)

    def leave(self) -> None:
        """Leave an elastic run at the end of its training."""
        connection = self._client.connection
        if self._elastic:
            for server in connection.servers:
                connection.post(server, Leave(*connection.sender, ""))
