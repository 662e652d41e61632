"""An island's membership in an elastic run, as one of its processes sees it: the first one is the worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.foundation.process_name import this_process
from lightning_asgd.core.leases.common_order import CommonOrder
from lightning_asgd.core.leases.sampler import digest
from lightning_asgd.core.protocol import LeaseHoldings
from lightning_asgd.core.worker.collectives import Collectives, Phase
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.module_state import digest_of
from lightning_asgd.core.worker.synchronizer import Synchronizer
from lightning_asgd.core.worker.untrained_state import UntrainedTensors
from lightning_asgd.elastic.elastic_run import ElasticFleet
from lightning_asgd.islands.blocks import is_sharded
from lightning_asgd.islands.group import IslandGroup, picklable
from lightning_asgd.islands.part_exchange import PartSender
from lightning_asgd.islands.synchronizer import IslandSynchronizer

T = TypeVar("T")

_POLL_S = 0.1  # for other islands to attach, or to leave
_LOOK_S = 10.0  # for which the other processes wait for the first one, which waits for other islands
_OVER = "over"  # noted by the island that hosts the run, once it has written its last file


class IslandFleet(ElasticFleet):
    """Calls the first process's membership on all processes together; see :class:`ElasticFleet`.

    ``islands`` is their number in a job that hosts the run for them, so that they begin and end together; else 0.
    """

    sender: PartSender

    def __init__(self, group: IslandGroup, *about: Any, islands: int = 0) -> None:
        self._group, self._place, self._islands = group, (0, 1), islands
        self.others_may_join = not islands
        super().__init__(*about)
        group.on("files", self._shell.adopt_checkpoint_states)
        group.report("chief has changed", lambda: self.attachment.outdated)
        group.report("error", lambda: None if self._heartbeat is None else picklable(self._heartbeat.error, 0))

    def _find(self) -> None:
        """Connect the first process to the run's servers."""
        if not self._group.leads:
            self.collectives, self.attachment = Collectives(), _NoAttachment()  # type: ignore[assignment]
            self.client = None  # type: ignore[assignment]
        self._group.share(super()._find)

    def _share(self, call: Callable[[], T]) -> T:
        return self._group.share(call)

    @property
    def rank(self) -> int:
        """The first process's; other processes have none of their own."""
        return super().rank if self._group.leads else self.sender.connection.worker

    @property
    def is_chief(self) -> bool:
        """Whether this process is the first one of the island that logs and writes checkpoints."""
        return self._group.leads and super().is_chief

    def writes(self) -> bool:
        """Whether this is that island. Its processes write a checkpoint together, and ask together."""
        return self._share(lambda: super(IslandFleet, self).is_chief)

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """The island's rank among those that were alive when its epoch began, and their number."""
        return self._place

    # ------------------------------------------------------------------ joining and leaving

    def join(self) -> None:
        """Attach the island; connect the other processes."""

        def attach() -> tuple[Any, ...]:
            super(IslandFleet, self).join()
            return self.entry, self.client.connection.worker, this_process()

        self.entry, worker, process = self._share(attach)
        if self._group.leads:
            connection = self.client.connection
        else:
            self._job.find_run()
            about, patience_s = (self._job.connect(), self.session, worker, 0), self._config.timeouts.collective_s
            connection = Connection(*about, timeout_s=self._config.reply_s, patience_s=patience_s)
            self.collectives.phase = Phase.SYNC
        self.sender = PartSender(connection, process)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Ask which workers take part."""

        def ask() -> tuple[int, int]:
            super(IslandFleet, self).begin_epoch()
            return super(IslandFleet, self).rank_and_size

        self._place = self._share(ask)

    def leave(self) -> None:
        """Leave the run; in a job together with the other islands."""
        if self._islands and not self._failed:
            self._end_together()
        if self._group.leads:
            super().leave()

    def begin_together(self) -> None:
        """In a job, wait for the other islands to attach."""
        timeout_s, seen = self._config.timeouts.collective_s, set(self.board.living)
        deadline = time.monotonic() + timeout_s

        def all_there() -> bool:
            seen.update(self.board.living)
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{len(seen)} of {self._islands} islands have attached within {timeout_s:g} s. Expected all. "
                    "The output of the missing islands' processes has the cause. If they only start slowly, raise "
                    "Timeouts(collective_s=...)."
                )
            return len(seen) >= self._islands

        self._wait_until(all_there)

    def _end_together(self) -> None:
        """Wait for all islands. The chief of the job has written its last file then."""

        def over() -> bool:
            if not self.attachment.bootstraps:
                return bool(self.client.note(_OVER))
            self.client.note(_OVER, True)
            return len(self.board.living) == 1

        self._wait_until(over)
        self.adopt_checkpoints()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Look for news until the first process finds that something is ``done``, however long that takes."""

        def look() -> bool:
            until = time.monotonic() + _LOOK_S
            while not (found := done()) and time.monotonic() < until:
                time.sleep(_POLL_S)
                self.client.connection.attend()  # others may wait for what this island knows of a lost server
                super(IslandFleet, self).check_session()
                super(IslandFleet, self).begin_epoch()
            return found

        while not self._share(look):
            pass

    def fail(self, error: BaseException) -> None:
        """Report a failure of any process: the island ends with it."""
        self._failed = True
        if self._group.leads:
            super().fail(error)
        elif hasattr(self, "sender"):
            what, lines = self._failure(error)
            self.sender.leave(what, lines)

    def check_session(self) -> None:
        """Raise if the session was ended, as the first process reported last."""
        if (error := self._group.known.get("error")) is not None:
            raise error

    # ------------------------------------------------------------------ a fit

    def restore_servers(self, synchronizer: Synchronizer, part: Callable[[], LeaseHoldings | None]) -> None:
        """Take part in the recovery of lost servers. The first process leads it, within a call that is shared."""
        leading = synchronizer.exchanger if isinstance(synchronizer, IslandSynchronizer) else None
        if leading is not None:
            super().restore_servers(leading, part)

    def share_first_values(
        self, layout: Layout, constants: Mapping[str, Tensor], progress: Callable[[], dict[str, Any] | None]
    ) -> None:
        """The bootstrap worker's first process publishes its values; all others adopt them."""
        self._begun = True
        plain = {name: tensor for name, tensor in constants.items() if not is_sharded(tensor)}

        def publish() -> None:
            super(IslandFleet, self).share_first_values(layout, plain, progress)

        self._share(publish)
        self._group.copy_first(plain)

    def _share_buffers(self, tensors: UntrainedTensors, *, publishes: bool, statistics: bool) -> None:
        """The first process does it for the island; the others take its buffers."""
        share = super()._share_buffers
        self._share(lambda: share(tensors, publishes=publishes, statistics=statistics))
        values = tensors.values()
        digests = self._group.gather({name: digest_of({"": value}) for name, value in values.items()})
        differing = [name for name, digest in digests[0].items() if any(each.get(name) != digest for each in digests)]
        first = self._share(lambda: {name: values[name] for name in differing})
        if not self._group.leads:
            tensors.take(first)

    def reference_batch(self, mine: int) -> int:
        """The batch size of the run's first worker."""
        return self._share(lambda: super(IslandFleet, self).reference_batch(mine))

    def common_order(
        self, epoch: str, samplers: list[str], mine: list[list[Any]], *, unites: bool = False
    ) -> CommonOrder:
        """The order of the worker that opened the epoch; other processes get it where theirs differs."""
        found: list[CommonOrder] = []

        def agree() -> bytes:
            found.append(super(IslandFleet, self).common_order(epoch, samplers, mine))
            return digest(found[0].parts)

        differs = self._group.any(self._share(agree) != digest(mine))
        return self._share(lambda: found[0]) if differs else CommonOrder(mine)

    def publish_chief_state(self) -> None:
        """Publish what the chief knows of its checkpoint files."""
        self._share(lambda: super(IslandFleet, self).publish_chief_state())

    def adopt_checkpoints(self) -> None:
        """Know what the chief has published of its files, on every process: they decide together what to write."""
        files = self._share(lambda: self.attachment.files)
        if files is not None:
            self._shell.adopt_checkpoint_states(files)

    def follow_chief(self) -> None:
        """Apply a change of chief that the first process has reported: all processes do before the same batch."""
        if self._group.known.get("chief has changed"):
            self._share(super().follow_chief)

    def _continue_as_chief(self) -> None:
        """Write checkpoints as the chief before has, on every process: they decide together what to write."""
        files = self.attachment.files
        if files is not None:
            self._group.order("files", files)

    def agree_to_stop(self, should_stop: bool, progress: Callable[[], dict[str, Any]]) -> bool:
        """Whether training ends."""
        stops = self._group.any(should_stop)
        return self._share(lambda: super(IslandFleet, self).agree_to_stop(stops, progress))


class _NoAttachment:
    """What a process has that is not the island's first."""

    chief = False
    bootstraps = False
    between_epochs = False
    files = None
