"""hivemind with local updates in a plain loop.

hivemind trains over the internet, among peers that find each other through a distributed hash table. It is made for
large batches: the peers agree that they have trained on so many samples together, look for a group, and average. Its
documentation gives the search 3 to 5 s in a small local run, and tells to lower that for smaller batches.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from rivals import Member, common_store

__all__ = ["REQUIREMENT", "peer"]

REQUIREMENT = "hivemind==1.1.12"
SEARCH_S = 1.0  # for a group; with less, peers miss each other in some rounds
PATIENCE_S = 10.0  # of a peer whose group does not answer


class Rounds(logging.Handler):
    """Counts the rounds in which all peers averaged, of which hivemind tells its log alone."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.text = f"Averaged parameters with {workers} peers"
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += record.getMessage() == self.text


@contextlib.contextmanager
def peer(layers: Any, optimizer: Any, rank: int, workers: int, period: int, batch: int) -> Iterator[Member]:
    """A peer that averages whenever all together have trained ``period`` batches each.

    Arguments as for :func:`rivals.unconnected`.
    """
    multiprocessing.current_process().daemon = False  # hivemind has processes of its own
    import hivemind

    rounds = Rounds(workers)
    logging.getLogger("hivemind.optim.state_averager").addHandler(rounds)
    store = common_store(rank, workers)
    others = [] if rank == 0 else json.loads(store.get("peers"))
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=others, start=True)
    if rank == 0:
        store.set("peers", json.dumps([str(address) for address in dht.get_visible_maddrs()]))
    shared = hivemind.Optimizer(
        dht=dht,
        run_id="rivals",
        optimizer=optimizer,
        batch_size_per_step=batch,
        target_batch_size=period * batch * workers,
        use_local_updates=True,
        matchmaking_time=SEARCH_S,
        averaging_timeout=PATIENCE_S,
        averager_opts={"request_timeout": SEARCH_S / 2},
        tracker_opts={"min_refresh_period": 0.1, "max_refresh_period": 1.0},
        verbose=True,  # else it does not tell of its rounds
    )

    def all_say(word: str, seconds: float = 60.0) -> None:
        store.set(f"{rank} {word}", "")
        store.wait([f"{other} {word}" for other in range(workers)], timedelta(seconds=seconds))

    all_say("is there")
    yield Member(shared, lambda: rounds.number)
    store.set(f"{rank} is done", "")
    while not store.check([f"{other} is done" for other in range(workers)]):
        shared.step()  # the others may wait for this one in a round
    all_say("has ended")
    shared.shutdown()
    dht.shutdown()
