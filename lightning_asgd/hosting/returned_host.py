"""How worker 0 finds a job that has moved: it was lost, another worker hosts the servers, and it is started again.

It hosts the job's first rendezvous once more, at the address that all processes were given. The worker that hosts the
servers looks there once a second, and notes where it is (:class:`Signpost`). Any process that is started again reads
that.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from lightning_asgd.core.job.addresses import listens
from lightning_asgd.core.job.facts import refused_in
from lightning_asgd.core.job.rendezvous import Rendezvous

_NOTE, _FOLLOWED = "moved", "moved/followed"
_LOOK_S, _LOOK_MOST_S, _POLL_S = 1.0, 60.0, 0.05
_CONNECT_S = 2.0
_NOTED_S = 2.5
_START_S = 5.0  # in which a worker that has just started sees the note
_LAST_PORT = 65535


@dataclass(frozen=True)
class Moved:
    """Where the servers of a job are announced now."""

    host: str  # of the rendezvous that announces them
    port: int  # of the same
    rank: int  # the worker whose process hosts it
    chief: int  # the worker that logs and writes checkpoints
    program: str  # tells the job from another one at the same address; see :func:`program_of`


def program_of(world_size: int) -> str:
    """What all processes of a job have in common, and keep when they are started again: their script and number."""
    return f"{Path(sys.argv[0]).name} {world_size}"


class Signpost:
    """Notes at a job's first address where the job has moved, whenever a process listens there again.

    ``where`` is None while this process does not host the servers.
    """

    def __init__(self, first: tuple[str, int], where: Callable[[], Moved | None]) -> None:
        self._first, self._where = first, where
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_asgd.signpost", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Note nothing any more. May be called more than once."""
        self._ended.set()
        self._thread.join(2 * _CONNECT_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        pause_s = _LOOK_S
        while not self._ended.wait(pause_s):
            where = self._where()
            if where is None or not listens(*self._first):
                pause_s = _LOOK_S
                continue
            try:
                with Rendezvous.connect(*self._first, _CONNECT_S) as there:
                    if _read(there.peek(_NOTE, list)) != where:
                        there.put(_NOTE, list(astuple(where)))
                pause_s = _LOOK_S
            except RuntimeError:  # another program may listen there, for as long as this job trains
                pause_s = min(2 * pause_s, _LOOK_MOST_S)


@dataclass(frozen=True)
class Arrival:
    """A process that has just started, perhaps again."""

    rank: int  # the worker that it is
    others: Collection[int]  # the other workers
    program: str  # see :func:`program_of`

    def announce(self, rendezvous: Rendezvous) -> None:
        """Let worker 0 know that this worker has come, so that it waits for no note."""
        rendezvous.put(f"here/{self.rank}", True)

    def follows(self, rendezvous: Rendezvous) -> Moved | None:
        """Where worker 0 has followed the job; None if it begins another one, or has not decided yet."""
        return self._moved(rendezvous) if rendezvous.peek(_FOLLOWED, bool) else None

    def await_moved(
        self,
        rendezvous: Rendezvous,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> Moved | None:
        """Where the job has moved, for worker 0, which hosts the first rendezvous. The others follow it.

        None once all others have come, since the job begins then, or one cannot; also if no worker notes anything.
        """
        begun, missing = clock(), set(self.others)
        deadline = begun + _START_S
        while missing and clock() < deadline:
            if refused_in(rendezvous) is not None:  # the host's note comes every second, if there is one
                deadline = min(deadline, begun + _NOTED_S)
            moved = self._moved(rendezvous)
            if moved is not None and moved.rank in missing:  # else that worker has been started again, too
                rendezvous.put(_FOLLOWED, True)
                return moved
            missing = {rank for rank in missing if rendezvous.peek(f"here/{rank}") is None}
            pause(_POLL_S)
        return None

    def _moved(self, rendezvous: Rendezvous) -> Moved | None:
        """What the servers' host has noted; what another program has noted counts for nothing."""
        moved = _read(rendezvous.peek(_NOTE, list))
        return moved if moved is not None and moved.program == self.program and moved.rank != self.rank else None


def _read(found: Any) -> Moved | None:
    match found:
        case [str(host), int(port), int(rank), int(chief), str(program)] if 0 < port <= _LAST_PORT:
            return Moved(host, port, rank, chief, program)
    return None
