from __future__ import annotations

import math
import queue
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_asgd.core.foundation.errors import WorkerLostError
from lightning_asgd.core.protocol import HeartbeatReply, WorkerMetrics
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.core.worker.session_client import HeartbeatThread

DEADLINE_S = 10.0


class Scripted:
    """Answers beats with what the test has put there, and tells the test of them."""

    def __init__(self, servers: int = 1) -> None:
        self.connection = SimpleNamespace(restored=(0,), servers=range(servers), gone=set())
        self.answered_at: dict[int, float] = {}
        self.answers: queue.Queue[Any] = queue.Queue()
        self.beats: queue.Queue[int] = queue.Queue()
        self.figures: list[WorkerMetrics | None] = []

    def beat(self, heard: int, timeout_s: float, figures: WorkerMetrics | None) -> HeartbeatReply | None:
        self.figures.append(figures)
        self.beats.put(heard)
        answer = self.answers.get(timeout=DEADLINE_S)
        if isinstance(answer, Exception):
            raise answer
        result: HeartbeatReply | None = answer
        return result


def test_news_are_told_once_and_the_end_of_the_session_is_kept() -> None:
    client = Scripted()
    told: list[str] = []
    chiefs: list[int] = []
    heartbeat = HeartbeatThread(client, 0.05, told.append, None, chiefs.append)  # type: ignore[arg-type]
    client.answers.put(HeartbeatReply(("worker 1 is away", "worker 2 is away"), chief=2))
    assert client.beats.get(timeout=DEADLINE_S) == 0
    client.answers.put(HeartbeatReply(("worker 1 is back",)))
    assert client.beats.get(timeout=DEADLINE_S) == 2
    client.answers.put(None)  # the server did not answer in time
    assert client.beats.get(timeout=DEADLINE_S) == 3
    assert heartbeat.error is None
    client.answers.put(WorkerLostError("too few workers"))
    assert client.beats.get(timeout=DEADLINE_S) == 3
    heartbeat._thread.join(DEADLINE_S)
    assert told == ["worker 1 is away", "worker 2 is away", "worker 1 is back"]
    assert chiefs == [2, 0]
    assert str(heartbeat.error) == "too few workers"
    heartbeat.stop()


def test_this_worker_s_figures_are_sent_and_the_others_are_put_on_the_board() -> None:
    client, board = Scripted(), MetricsBoard()
    heartbeat = HeartbeatThread(client, 0.05, board=board)  # type: ignore[arg-type]
    client.beats.get(timeout=DEADLINE_S)
    mine, theirs = WorkerMetrics(at_s=1.0, samples=8), WorkerMetrics(at_s=2.0, samples=16)
    board.post(0, mine)
    client.answers.put(HeartbeatReply((), (0, 2), {2: theirs}))
    client.beats.get(timeout=DEADLINE_S)
    assert client.figures == [None, mine]
    assert (board.figures, board.living) == ({0: mine, 2: theirs}, (0, 2))
    client.answers.put(None)  # no answer in time changes nothing
    client.beats.get(timeout=DEADLINE_S)
    assert (board.figures, board.living) == ({0: mine, 2: theirs}, (0, 2))
    client.answers.put(WorkerLostError("over"))
    heartbeat.stop()


def test_servers_that_do_not_answer_while_the_coordinator_does_are_reported() -> None:
    client, silent = Scripted(servers=4), queue.Queue[list[int]]()
    client.connection.gone.add(3)  # it is being restored
    client.answered_at[2] = math.inf
    heartbeat = HeartbeatThread(client, 0.05)  # type: ignore[arg-type]
    heartbeat.on_silent_servers = silent.put
    while silent.empty():
        client.answers.put(HeartbeatReply())
        client.beats.get(timeout=DEADLINE_S)
    assert silent.get() == [1]
    client.answers.put(WorkerLostError("over"))
    heartbeat.stop()


@pytest.mark.parametrize("beats", [0, 2])
def test_it_ends_when_it_is_stopped(beats: int) -> None:
    client = Scripted()
    heartbeat = HeartbeatThread(client, 1000.0 if beats == 0 else 0.05)  # type: ignore[arg-type]
    for _ in range(beats):
        client.answers.put(HeartbeatReply(("news that nobody wants",)))
        client.beats.get(timeout=DEADLINE_S)
    client.answers.put(None)  # for one that has begun
    heartbeat.stop()
    assert not heartbeat._thread.is_alive()
    assert heartbeat.error is None
