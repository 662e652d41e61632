"""A process that replaces a worker that has died or is silent: how it gets the rank, and where it begins.

The others train meanwhile, and no worker waits for it. Worker 0 publishes at the beginning of every sync interval where
all are (:class:`EntryPoint`). The replacement sets itself up from that, with the servers' weights, without any
collective; its first batch makes it a member like the others. Collectives that they have completed since are kept for
it, as for a worker that hung.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.foundation.process_name import is_gone, pid_of
from lightning_asgd.core.protocol import Joined, RankHeld
from lightning_asgd.core.worker.connection import COORDINATOR
from lightning_asgd.core.worker.session_client import SessionClient

_NAME = "entry"
_ASK_AGAIN_S = 0.1


@dataclass(frozen=True)
class EntryPoint:
    """Where all workers of a fit are at the beginning of a sync interval."""

    session: str  # the fit's
    collective: int = 0  # number of the latest that all have completed
    layout: Any = None  # description of what is exchanged
    constants: bytes = b""  # digest of the tensors that are not
    firsts: Mapping[str, int] = field(default_factory=dict)  # values of worker 0 that the others use, by name
    # What a checkpoint would hold of loops, schedules and callbacks; None at the first batch of a fit.
    progress: dict[str, Any] | None = None
    refused: str = ""  # why no process can enter; empty if one can
    chief: int = 0  # the worker that logs and writes checkpoints
    # Where each worker would host the servers; empty where only one can.
    places: Mapping[int, Any] = field(default_factory=dict)

    @property
    def between_epochs(self) -> bool:
        """Whether that is the beginning of an epoch after the first."""
        return bool((self.progress or {}).get("between_epochs"))


def take_rank(client: SessionClient, clock: Callable[[], float] = time.monotonic) -> Joined:
    """Join all servers with a rank; another process is replaced once it is known to be dead or silent.

    Returns the coordinator's answer. Raises a :class:`LaunchError` if the other process is heard meanwhile.
    """
    joined = [_take(client, server, clock) for server in client.connection.servers]
    return replace(joined[COORDINATOR], late=any(each.late for each in joined))


def _take(client: SessionClient, server: int, clock: Callable[[], float]) -> Joined:
    begun, worker = clock(), client.connection.worker
    while True:
        sent = clock()
        answer = client.connection.ask(server, replace(client.join_message(server), replaces=True))
        if isinstance(answer, Joined):
            client.note_joined(server, answer)
            return answer
        held: RankHeld = answer
        if is_gone(held.process):
            client.leave("its process has ended", worker=worker, pid=pid_of(held.process))
        elif held.silent_s < sent - begun:  # it lives: be rejected with its error
            client.join(server=server)
        else:
            time.sleep(_ASK_AGAIN_S)


def publish_entry(client: SessionClient, entry: EntryPoint) -> None:
    """Publish where all are, or that no process can enter, since its progress cannot be pickled. For worker 0."""
    try:
        client.note(_NAME, entry)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        client.note(_NAME, EntryPoint(entry.session, refused=f"its callbacks' state cannot be pickled ({error!r})"))


def await_entry(client: SessionClient, after: int, timeout_s: float, check: Callable[[], None]) -> EntryPoint:
    """Wait until the others train, having completed collective number ``after``; ``check`` is called meanwhile."""
    connection, deadline = client.connection, time.monotonic() + timeout_s
    refused = f"Worker {connection.worker} cannot be replaced in session {connection.session!r}"
    while True:
        found = client.note(_NAME)
        if isinstance(found, EntryPoint) and found.session == connection.session:
            if found.refused:
                raise LaunchError(f"{refused}: {found.refused}. Start the whole job again, from its last checkpoint.")
            if found.collective >= after:
                return found
        check()
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{refused}: worker 0 did not train within {timeout_s:g} s. Expected it to: look at its output, or "
                "raise timeouts.collective_s."
            )
        time.sleep(_ASK_AGAIN_S)
