"""A sync point: workers exchange a payload and leave with identical weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_asgd.protocol import Place, SyncReport
from lightning_asgd.worker.collectives import Collectives
from lightning_asgd.worker.session_client import SessionClient
from lightning_asgd.worker.synchronizer import Synchronizer, run

__all__ = ["all_together", "synchronize"]


def all_together(places: Iterable[Place]) -> Place:
    """When sync points occur: at the end of an epoch if it ends for all, at a validation if any worker validates."""
    known = list(places)
    return Place(
        ends=all(place.ends for place in known),
        validates=any(place.validates for place in known),
        step=max(place.step for place in known),
        batches=max(place.batches for place in known),
    )


def synchronize(
    client: SessionClient,
    collectives: Collectives,
    synchronizer: Synchronizer,
    name: str,
    mine: SyncReport,
    *,
    all_have_pushed: bool,
    always: bool = False,
) -> dict[int, SyncReport]:
    """Wait for all living workers; if any has trained, give them the servers' weights, the same bits everywhere.

    All workers call this after pushing what they trained; ``all_have_pushed`` says that this worker knows that the
    others have, too. With ``always`` weights are fetched even if no worker has trained. Returns the payloads by rank.
    Raises a :class:`CollectiveTimeoutError` that names a missing worker.
    """
    restored = list(client.connection.restored)
    if all_have_pushed and mine.moved and synchronizer.final_once_pushed:
        # Most probably the same for all. If another worker fetched other versions, all fetch again.
        run(synchronizer.fetch(park=True))
        if client.connection.restored == restored:
            mine = replace(mine, versions=tuple(synchronizer.versions))
    met: dict[int, SyncReport] = collectives.gather("sync point", name, mine, stops=mine.halts)
    fetched = {m.versions for m in met.values()}
    if None not in fetched and len(fetched) == 1:
        if mine.versions not in fetched:  # this worker was silent, and the others completed the sync point without it
            run(synchronizer.fetch(park=True))
        return met
    # A fetch also ends the worker's rest on the servers: all must have fetched before any worker trains.
    again = always or any(m.moved for m in met.values())
    while again:  # after the loss of a server some may have fetched before others had replayed
        run(synchronizer.fetch(park=True))
        changed, restored = client.connection.restored != restored, list(client.connection.restored)
        again = any(collectives.gather("barrier", f"{name}: all have the weights", changed).values())
    return met
