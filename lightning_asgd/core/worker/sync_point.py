"""A sync point: workers exchange a payload and leave with identical weights."""

from __future__ import annotations

from dataclasses import replace

from lightning_asgd.core.protocol import JointReport, SyncReport
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.synchronizer import Synchronizer, run


def synchronize(
    client: SessionClient,
    collectives: Collectives,
    synchronizer: Synchronizer,
    name: str,
    mine: SyncReport,
    *,
    all_have_pushed: bool,
    always: bool = False,
) -> JointReport:
    """Wait for all living workers; if any has trained, give them the servers' weights, the same bits everywhere.

    All workers call this after pushing what they trained; ``all_have_pushed`` says that this worker knows that the
    others have, too. With ``always`` weights are fetched even if no worker has trained. Returns what the reports come
    to. Raises a :class:`CollectiveTimeoutError` that names a missing worker.
    """
    restored = list(client.connection.restored)
    if all_have_pushed and mine.moved and synchronizer.final_once_pushed:
        # Most probably the same for all. If another worker fetched other versions, all fetch again.
        run(synchronizer.fetch(park=True))
        if client.connection.restored == restored:
            mine = replace(mine, versions=tuple(synchronizer.versions))
    met: JointReport = collectives.reduced("sync point", name, mine, "report", stops=mine.halts).value
    if met.versions is not None:
        if mine.versions != met.versions:  # this worker was silent, and the others completed the sync point without it
            run(synchronizer.fetch(park=True))
        return met
    # A fetch also ends the worker's rest on the servers: all must have fetched before any worker trains.
    again = always or met.moved
    while again:  # after the loss of a server some may have fetched before others had replayed
        run(synchronizer.fetch(park=True))
        changed, restored = client.connection.restored != restored, list(client.connection.restored)
        again = collectives.reduced("barrier", f"{name}: all have the weights", changed, "any").value
    return met
