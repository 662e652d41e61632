"""A worker's membership in a job, whose workers start and end together."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_asgd.core.algorithms.base import Payload
from lightning_asgd.core.algorithms.config import ExchangeConfig, Timeouts
from lightning_asgd.core.foundation.errors import (
    ASGDError,
    ConfigurationError,
    LaunchError,
    LayoutMismatchError,
    ServerLostError,
    WorkerLostError,
)
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.job import rank_variables, supervisor
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.leases.common_order import CommonOrder, agreed_order
from lightning_asgd.core.protocol import Joined, Policy, next_chief
from lightning_asgd.core.worker.collectives import Phase
from lightning_asgd.core.worker.connection import COORDINATOR
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.fleet import Fleet, here, idle_membership
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.core.worker.session_client import HeartbeatThread, unpickled
from lightning_asgd.core.worker.shell import Shell
from lightning_asgd.core.worker.synchronizer import Synchronizer
from lightning_asgd.core.worker.untrained_state import UntrainedTensors
from lightning_asgd.replacement.late_entry import EntryPoint, await_entry, publish_entry, take_rank

log = logging.getLogger(__name__)

_BUFFERS = "buffers"  # the chief's, as of the latest sync point
_LAST = "last checkpoint"  # which worker writes it
_ORDERS = "orders differ"  # whether samplers have orders of their own
_CHIEF_STATE = "chief"  # what the chief publishes for the next one
_UNREACHABLE_S = 20.0  # without an answer of the servers, after which a worker looks for another host
_NEWS_S = 1.0  # until worker 0 reports what has happened to another worker
_RECENT_S = 10.0  # after which an event is old: a worker that becomes chief prints the events since then


def _looks(timeouts: Timeouts) -> tuple[float, float]:
    """Seconds without an answer until a worker looks for another host, and from then on until it gives up."""
    return max(_UNREACHABLE_S, 2 * timeouts.silence_s), timeouts.start_s


class FixedFleet(Fleet):
    """One worker's membership in a session, which ``fits`` or not. Raises a :class:`LaunchError` without servers."""

    def __init__(
        self,
        job: TrainingJob,
        config: ExchangeConfig,
        policy: Policy,
        board: MetricsBoard,
        shell: Shell,
        place: tuple[int, int],  # rank and world size
        *,
        fits: bool,
    ) -> None:
        rank, world_size = place
        # Where the main process starts the workers, no process can be started again for a single one of them.
        self._may_enter = job.hosts is not None or not policy.another_chief
        if job.hosts is not None:
            timeouts = config.timeouts
            may_vote_s = 0.0 if job.interface == "lo" else sum(_looks(timeouts)) + timeouts.silence_s
            policy = replace(policy, another_chief=True, elsewhere_s=may_vote_s, chief=job.hosts.chief)
        # Hogwild and LayerWise cannot exclude a worker: its pushes cannot be undone. No worker waits for a single one.
        self._watched = world_size > 1 and config.algorithm.payload not in (Payload.LAYERS, Payload.NONE)
        if not self._watched:
            policy = replace(policy, silence_s=0.0)
        super().__init__(job, config, policy, board, shell, alone=world_size == 1)
        self.another_chief, self._fits = policy.another_chief, fits
        # What does not change during the fit, and the progress when the latest epoch began.
        self._start = EntryPoint("")
        self._layouts = 0  # layouts made in this session
        self._exited: set[int] = set()  # workers that this process had started
        self._unprinted: deque[tuple[float, str]] = deque(maxlen=20)  # events while another was chief, and when
        self.chief = 0
        """The worker that logs and writes checkpoints; changes between two batches and in collectives only."""
        self._main = rank_variables.main_process()
        self._connect(rank, world_size)
        if job.hosts is not None:
            self.chief = self.collectives.chief = job.hosts.chief
            job.hosts.min_workers = policy.min_workers
            self._speak_if_chief()

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The worker's rank among the members, and their number."""
        return self.rank, self.client.connection.world_size

    def join(self) -> None:
        """Join, and wait until all have joined; a replacement waits until the others train."""
        joined = self._join()
        self.collectives.on_chief = lambda: self._follow(self.collectives.chief)
        overseer = supervisor.current()
        if overseer is not None:
            overseer.on_worker_exit(self._report_exit)
        if self._watched:
            silence_s, every_s = self._policy.silence_s, _NEWS_S if self.is_chief else math.inf
            about = self.client, silence_s, self._tell, self.board, self._hear
            self._heartbeat = HeartbeatThread(*about, at_least_every_s=every_s)
            self._heartbeat.on_silence = self._look_for_host
            if self._job.server_machines > 1:
                self._heartbeat.on_silent_servers = self._look_for_replacements
        if joined.late:
            self._enter_after(joined.collectives)
        else:
            self._agree_on_places()

    def _agree_on_places(self) -> None:
        """Learn where all are. A worker that failed in the session before may have another chief."""
        hosts, place = self._job.hosts, (socket.gethostname(), str(self._shell.device))
        mine = (place, hosts and hosts.mine, self.collectives.chief)
        joined = self.collectives.gather("all_gather", "join", mine)
        self.board.places = {rank: place for rank, (place, _, _) in joined.items()}
        if hosts is not None:
            hosts.joined({rank: theirs for rank, (_, theirs, _) in joined.items()})
            self.collectives.chief = next_chief(joined[min(joined)][2], joined)
            self._follow(self.collectives.chief)

    def _look_for_host(self, silent_s: float) -> None:
        """The servers have not answered for so long. Their machine may be lost, or only the network between."""
        hosts, recovery, (looks_s, gives_up_s) = self._job.hosts, self._recovery, _looks(self._config.timeouts)
        if hosts is None or recovery is None:
            return
        silent_s = min(silent_s, time.monotonic() - hosts.moved_at)
        if silent_s < looks_s:
            return
        replaced = tuple(self.client.connection.replaced)
        try:
            hosts.gave_up |= silent_s > looks_s + gives_up_s and hosts.is_lost
            if hosts.gave_up or self._job.look_for_host():
                recovery.lose_all(replaced)
        except Exception:  # else the heartbeats would end, and no message would say why
            log.exception("Worker %d could not look for another host of the servers.", self.rank)
            recovery.lose_all(replaced)

    def _hear(self, _: int) -> None:
        if self._job.hosts is not None:
            self._job.hosts.hear(self.client.heard.living, self.client.members[COORDINATOR].left)

    def _tell(self, event: str) -> None:
        """Note what has happened; print it on the chief, unless this process has seen and printed it."""
        self.board.note(event)
        seen = any(event.startswith(f"Worker {rank} is lost: its process ended") for rank in self._exited)
        if self.is_chief and not seen:
            log.warning(event)
        elif not seen:
            self._unprinted.append((time.monotonic(), event))

    # ------------------------------------------------------------------ the chief

    @property
    def is_chief(self) -> bool:
        """Whether this worker logs and writes checkpoints."""
        return self.rank == self.chief

    def check_session(self) -> None:
        """Raise at once if the session was ended; become chief if the chief is gone."""
        if self._heartbeat is not None and self._heartbeat.error is not None:
            raise self._heartbeat.error
        if self._main not in (None, os.getppid()):
            if self._job.hosts is not None:
                raise WorkerLostError("The main process of this machine has ended. The other machines continue.")
            raise WorkerLostError(
                "The main process, which hosts the servers, has ended. Resume from main-process-lost-*.ckpt, which "
                "one of its workers writes now: that worker's output has the path."
            )
        heard, agreed = self.client.heard, self.collectives.chief
        chief = agreed if agreed in heard.living or not heard.living else heard.chief
        if chief != self.chief and self._follow(chief):
            # This worker's own callbacks count files that they would have written since the last sync point.
            self._shell.adopt_checkpoint_states(self.published_checkpoints())

    def _follow(self, chief: int) -> bool:
        """Take a worker for the chief from now on; returns whether this one has become it."""
        before, self.chief = self.chief, chief
        if chief == before:
            return False
        self.client.policy = replace(self.client.policy, chief=chief)  # for servers that are restored
        if self._job.hosts is not None:
            self._job.hosts.chief = chief
        self._speak_if_chief()
        if self.is_chief:
            for at, event in list(self._unprinted):  # the heartbeat thread may append meanwhile
                if time.monotonic() - at < _RECENT_S:  # the chief before may not have lived to print it
                    log.warning(event)
            self.board.note(f"Worker {before} is lost. Worker {chief} logs and writes the checkpoints from now on.")
            self._shell.take_over(self.rank, before, (self.client.note(_CHIEF_STATE) or {}).get("loggers", ()))
        return self.is_chief

    def _speak_if_chief(self) -> None:
        self._shell.speak_as(0 if self.is_chief else max(1, self.rank))

    @property
    def _servers_ended(self) -> bool:
        """Whether the servers are lost, and no other worker can host new ones."""
        return self._main not in (None, os.getppid()) if (hosts := self._job.hosts) is None else hosts.gave_up

    def fail(self, error: BaseException) -> None:
        """Report a failure; if it is that the servers are gone, one of the workers writes a last checkpoint."""
        hosts, overseer, restorable = self._job.hosts, supervisor.current(), self._recovery is not None
        if self._servers_ended and self._shell.trains:
            try:
                self._write_last_checkpoint()
            except Exception:
                log.error("The servers have exited. No last checkpoint could be written.", exc_info=True)
        if hosts is not None:
            hosts.resign()
        super().fail(error)
        if hosts is not None and hosts.present == self.rank and restorable and overseer is not None:
            overseer.close()  # the others continue with other servers, however long this process lives on

    def _write_last_checkpoint(self) -> None:
        self._stop_restoring()  # no process starts other servers
        self.collectives.phase = Phase.OFFLINE
        writer: int | None
        if self._job.hosts is None:
            writer = self._chosen_writer()
        else:
            self.client.connection.transport.close()  # or this worker would wait for servers that it cannot reach
            writer = self._job.hosts.candidate()
        if writer in (None, self.rank):
            self.chief = self.rank
            self._shell.write_last_checkpoint(self.rank, main=self._job.hosts is None)

    def _chosen_writer(self) -> int:
        try:
            return int(self.client.note(_LAST, self.rank, first=True))
        except RuntimeError:  # the servers are gone already
            others = set(self.client.heard.living) - (set() if self.another_chief else {0})
            return min(others, default=self.rank)

    def published_checkpoints(self) -> list[Any]:
        """What a chief that is gone published last of its checkpoint callbacks' files; this worker's if it has not."""
        state = self.client.note(_CHIEF_STATE)
        return self._shell.checkpoint_states() if state is None else list(state["checkpoints"])

    def agree_on_checkpoints(self, published: bytes | None, *, final: bool) -> None:
        """See :class:`Roster`. Until the end all take the chief's decisions: ranks may log other values."""
        if published is not None or self.collectives.real:
            states = self.published_checkpoints() if published is None else unpickled("the chief", published)
            self._shell.adopt_checkpoint_states(states, agrees=not final and not self.is_chief)
        self.publish_chief_state()

    def publish_chief_state(self) -> None:
        """Publish what the next chief needs to know. The chief does, at sync points and after it has written a file."""
        if self.alone or not self.another_chief or self.collectives.phase is Phase.OFFLINE:
            return
        if self.is_chief:
            self.client.note(_CHIEF_STATE, self._shell.chief_state())
        elif self._job.hosts is not None:
            self.client.note(_CHIEF_STATE)  # the servers may be lost together with the chief

    def begin_generation(self) -> None:
        """Move to the session's next generation, with another layout, together with all others."""
        if self.collectives.phase is Phase.ENTERING:  # the others would lose their session
            raise LayoutMismatchError(
                f"Worker {self.rank} was replaced, but its new process has unfrozen parameters before its first batch. "
                "Expected those of the others. Unfreeze them at the same step or epoch after every start of the script."
            )
        self.collectives.barrier("new layout")
        self._layouts += 1
        self.entry = None
        before, session = self.collectives, self.client.connection.session
        self._connect(*self.rank_and_size, self._layouts, after=session)
        self._stop()
        self.collectives.waited_s, self.collectives.chief = before.waited_s, before.chief
        self.join()
        self.publish_chief_state()  # a server keeps nothing of the generation before

    def _join(self) -> Joined:
        client = self.client
        try:
            return self._take_rank()
        except ServerLostError as error:  # the server ended between the sessions, while no worker used it
            if error.server is None:
                raise
            client.connection.transport.prepare(error.server, self._job.successor(error.server))
            client.connection.replace(error.server)
            return self._take_rank()

    def _take_rank(self) -> Joined:
        if self._watched and not self._layouts:  # else no process can tell that the process before this one is gone
            return take_rank(self.client)
        self.client.join()
        return Joined(0)

    def _report_exit(self, rank: int, pid: int, code: int) -> None:
        """Called by the supervisor's thread when a worker's process has ended."""
        overseer = supervisor.current()
        rests = idle_membership() is self  # then no fit continues without it
        if overseer is not None and not self._policy.abort and not rests:
            overseer.excuse(rank)
        if code != 0 and rests:
            log.warning("Worker %d ended with exit code %d after the fit.", rank, code)
        elif code != 0:
            self._exited.add(rank)
            log.warning("Worker %d ended with exit code %d; the others continue without it.", rank, code)
        self.client.leave(f"its process ended with exit code {code} ({here(pid)})", worker=rank, pid=pid)

    def lost_workers(self) -> dict[int, str]:
        """The workers that are not there at the end of a fit, and why."""
        client = self.client
        if self._watched:
            with contextlib.suppress(ASGDError):
                client.beat(0, _NEWS_S)  # a worker may have rejoined since the latest heartbeat
        away = set(range(self.rank_and_size[1])) - {self.rank, *client.heard.living} if client.heard.living else set()
        silent = dict.fromkeys(sorted(away), "it missed its heartbeats and has not rejoined")
        return {**silent, **{worker: why for worker, why in client.members[COORDINATOR].left.items() if why}}

    def reference_batch(self, mine: int) -> int:
        """The reference batch size: the chief's; ``mine`` is 0 if this worker's is not known."""
        return self.of_first_worker(mine, "batch size")

    def of_first_worker(self, mine: int, what: str = "batches per step") -> int:
        """The chief's value. All workers call it together."""
        if self.entry is not None and self.collectives.phase is Phase.ENTERING:
            return self.entry.firsts.get(what, mine)
        first = self.collectives.broadcast_of_chief(mine, what)
        self._start = replace(self._start, firsts={**self._start.firsts, what: first})
        return first

    def all_have(self, data: bytes) -> bool:
        """Whether all workers have the same training data, named by a digest; empty if a worker has none to share."""
        mine = int.from_bytes(data[:7], "big")
        if self.entry is not None and self.collectives.phase is Phase.ENTERING:
            theirs = self.entry.firsts.get("data", 0)
            if theirs not in (0, mine):
                raise ConfigurationError(
                    f"Worker {self.collectives.rank} has other training data than the job that it joins. Expected the "
                    "same data set on every worker."
                )
            return theirs == mine != 0
        same = mine if self.collectives.reduced("all_reduce", "data", mine, "same").value else 0
        self._start = replace(self._start, firsts={**self._start.firsts, "data": same})
        return same != 0

    def common_order(
        self, epoch: str, samplers: list[str], mine: list[list[Any]], *, unites: bool = False
    ) -> CommonOrder:
        """The chief's order, if they differ. It is published where a process may enter later that cannot make it."""
        if self.entry is not None and self.collectives.phase is Phase.ENTERING:
            theirs = self.client.published_order(epoch) if samplers or self.entry.firsts.get(_ORDERS) else None
            return CommonOrder(theirs or mine, differs=theirs is not None)
        found = agreed_order(self.collectives, mine, unites=unites)
        self._start = replace(self._start, firsts={**self._start.firsts, _ORDERS: int(found.differs)})
        if self._publishes and (found.differs or samplers):
            self.client.publish_order(epoch, found.parts)
        if found.differs and self.is_chief:
            self._tell_order(samplers, found.about)
        return found

    def gather_optimizer_states(self, mine: Mapping[str, object]) -> Mapping[int, object]:
        """All workers' optimizer and scheduler states, for the checkpoint that the chief writes."""
        return self.collectives.gather("gather", "checkpoint", mine, target=self.collectives.chief)

    def agree_to_stop(self, should_stop: bool, progress: Callable[[], dict[str, Any]]) -> bool:
        """Whether training ends with this epoch. All workers call it at the end of the epoch."""
        if self._notes_entry:
            self._start = replace(self._start, progress=progress())
        return self.collectives.decide(should_stop, all=False)

    # ------------------------------------------------------------------ a process that replaces a lost worker

    @property
    def _notes_entry(self) -> bool:
        """Whether another process may enter this session, and this worker may have to say where all are."""
        return self._may_enter and not self.alone and not self._layouts and self._watched

    @property
    def _publishes(self) -> bool:
        """Whether it is for this worker to say where all are."""
        return self.is_chief and self._notes_entry

    def _enter_after(self, collectives: int) -> None:
        """Wait until the others train, and begin where they are."""
        if not self._fits:
            raise LaunchError(
                f"Worker {self.rank} cannot be replaced: the others are not in fit now. "
                "Expected a replacement during fit only. Start the whole job again."
            )
        entry = await_entry(self.client, collectives, self._config.timeouts.collective_s, self.check_session)
        self.entry, self.collectives.phase = entry, Phase.ENTERING
        self.chief = self.collectives.chief = entry.chief
        self.client.policy = replace(self.client.policy, chief=self.chief)
        self._speak_if_chief()
        if (hosts := self._job.hosts) is not None:
            hosts.enter(entry.places, entry.chief)

    def share_first_values(
        self, layout: Layout, constants: Mapping[str, Tensor], progress: Callable[[], dict[str, Any] | None]
    ) -> None:
        """Note where this fit begins, for a process that replaces a lost worker."""
        if self._notes_entry:
            self._start = EntryPoint(self.client.connection.session, layout=layout.describe(), progress=progress())

    def begin_untrained(self, tensors: UntrainedTensors) -> None:
        """See :class:`Fleet`: those of the latest sync point are published for processes that replace lost workers."""
        if self.entry is not None and self.collectives.phase is Phase.ENTERING:
            session, values = self.client.note(_BUFFERS) or ("", {})
            tensors.take(values if session == self.client.connection.session else {})
        if self._publishes:
            self.client.note(_BUFFERS, (self.client.connection.session, tensors.values()))

    def begin_interval(
        self, synchronizer: Synchronizer, place: Mapping[str, Any] | None, progress: Callable[[], dict[str, Any]]
    ) -> None:
        """See :class:`Fleet`. Take part from now on if others trained already; as worker 0, publish where all are."""
        if self.collectives.phase is Phase.ENTERING and self.entry is not None:
            self.client.join(since=self.entry.collective)
            self.collectives.enter(self.entry.collective)
        elif self._publishes and isinstance(synchronizer, Exchanger) and place is not None:
            entry = replace(self._start, collective=self.collectives.called, constants=synchronizer.constants)
            entry = replace(entry, chief=self.chief, places=getattr(self._job.hosts, "places", {}))
            if place:
                entry = replace(entry, progress={**progress(), "between_epochs": False, "data": place})
            publish_entry(self.client, entry)
        elif self._publishes:
            self._refuse("every worker trains a fixed part of the data, or what workers share cannot be undone")
        super().begin_interval(synchronizer, place, progress)

    def end_entries(self) -> None:
        """See :class:`Fleet`."""
        if self._publishes:
            self._refuse("training has ended")

    def _refuse(self, why: str) -> None:
        publish_entry(self.client, EntryPoint(self.client.connection.session, refused=why))
