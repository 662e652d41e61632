"""How workers meet at a sync point: all tell each other something, and have the same weights afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_asgd.protocol import Place, SyncReport
from lightning_asgd.worker.collectives import Collectives
from lightning_asgd.worker.session_client import SessionClient
from lightning_asgd.worker.synchronizer import Synchronizer

__all__ = ["all_together", "synchronize"]


def all_together(places: Iterable[Place]) -> Place:
    """Where workers are together: at the end of an epoch if it ends for all, at a validation if any validates."""
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
    """Wait for all living workers and give them the servers' weights, the same bits everywhere, if any has trained.

    All workers call it together, each having pushed what it trained; ``all_have_pushed`` says that this worker knows
    that the others have, too. With ``always`` weights are fetched although nobody has trained. Returns what all say, by
    rank; raises a :class:`CollectiveTimeoutError` that names a worker that did not come.
    """
    restored = list(client.connection.restored)
    if all_have_pushed and mine.moved and synchronizer.final_once_pushed:
        # Most probably what all get. Where others have fetched something else, all do it again.
        synchronizer.fetch(park=True)
        if client.connection.restored == restored:
            mine = replace(mine, versions=tuple(synchronizer.versions))
    met: dict[int, SyncReport] = collectives.gather("sync point", name, mine, stops=mine.halts)
    fetched = {m.versions for m in met.values()}
    if None not in fetched and len(fetched) == 1:
        if mine.versions not in fetched:  # the others have met without this worker, which was silent
            synchronizer.fetch(park=True)
        return met
    # A fetch also tells the servers that the worker rests no more: all must have done it before anybody trains.
    again = always or any(m.moved for m in met.values())
    while again:  # where a server was lost some may have fetched before others had pushed again
        synchronizer.fetch(park=True)
        changed, restored = client.connection.restored != restored, list(client.connection.restored)
        again = any(collectives.gather("barrier", f"{name}: all have the weights", changed).values())
    return met
