"""Training data that are cached in parts, one on each machine of a job."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_asgd.caches.cache import CachedDataset, cached_dataset
from lightning_asgd.caches.peer_caches import CacheServer, PeerCaches
from lightning_asgd.core.calls.shared_memory import host_identity
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.private_names import training_loaders
from lightning_asgd.core.worker.collectives import Phase
from lightning_asgd.core.worker.feature import Fit, WorkerFeature

log = logging.getLogger(__name__)


class PartitionedCaches(WorkerFeature):
    """Connects the caches of one fit's training data, until :meth:`close`.

    One worker of each machine answers the other machines. If its process ends, its machine's part is read from storage.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._datasets: list[CachedDataset] = []
        self._servers: list[CacheServer] = []

    def close(self) -> None:
        """Answer no more, and ask no more."""
        for dataset in self._datasets:
            if dataset.peers is not None:
                dataset.peers.close()
            dataset.ask(None)
        self._datasets = []
        self._stop_answering()

    def _stop_answering(self) -> None:
        for server in self._servers:
            server.close()
        self._servers = []

    def data_ready(self) -> None:
        """New training data were set up: connect their caches, together with all other workers."""
        self.close()
        membership = self._fit.membership
        found = (cached_dataset(getattr(loader, "dataset", None)) for loader in training_loaders(self._fit.trainer))
        self._datasets = [dataset for dataset in found if dataset is not None and dataset.partitioned]
        if not self._datasets or membership.alone:
            return
        if membership.comes_and_goes or membership.collectives.phase is Phase.ENTERING:
            log.warning("This worker joined by itself: it does not ask other machines' caches for samples.")
            return
        interface, machine = membership.secure_interface, host_identity()
        if interface is not None:
            self._servers = [CacheServer(d.cache, interface) for d in self._datasets if d.cache is not None]
        mine = [server.address for server in self._servers]
        answers = membership.collectives.gather("all_gather", "caches", (machine, mine))
        if len({each for each, _ in answers.values()}) == 1:  # there is nothing to divide
            self._stop_answering()
        elif interface is None:
            raise ConfigurationError(
                "CachedDataset(partitioned=True) was given in a job on several machines with transport='rpc', which "
                "lets strangers in. Expected transport='zmq': samples of other machines are unpickled."
            )
        else:
            self._connect(machine, mine, [answers[rank] for rank in sorted(answers)])

    def _connect(self, machine: str, mine: list[str], answers: Sequence[tuple[str, list[str]]]) -> None:
        """Ask the first worker of each machine; answer if this worker is one of them."""
        first: dict[str, list[str]] = {}
        for each, addresses in answers:
            if len(addresses) == len(self._datasets):
                first.setdefault(each, addresses)
        if first.get(machine) != mine:
            self._stop_answering()
        if machine in first:
            for number, dataset in enumerate(self._datasets):
                dataset.ask(PeerCaches([addresses[number] for addresses in first.values()], [*first].index(machine)))
