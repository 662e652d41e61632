"""Signs of life: while a worker is in a session, the servers hear of it a few times within the time they wait for one.

A thread of its own sends them, with the worker's latest figures, since the training thread may be in a long step, in a
validation, or waiting. A process that is stopped or has lost its network sends none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_asgd.errors import ASGDError
from lightning_asgd.monitoring.metrics_board import MetricsBoard
from lightning_asgd.worker.client import Client
from lightning_asgd.worker.connection import COORDINATOR

__all__ = ["HeartbeatThread"]

_PER_PATIENCE = 5  # signs within the time after which a worker counts as away


class HeartbeatThread:
    """Sends signs of life of one worker until it is stopped.

    Args:
        client: connection to the servers, joined.
        silence_s: seconds after which a worker that sends none counts as away.
        on_news: told what became of other workers; None if nobody wants to know.
        board: has this worker's figures, and is told the others'.
        on_chief: told which worker logs and writes checkpoints, with every answer.
        told: number of news that are known.
    """

    def __init__(
        self,
        client: Client,
        silence_s: float,
        on_news: Callable[[str], None] | None = None,
        board: MetricsBoard | None = None,
        on_chief: Callable[[int], None] = lambda _: None,
        told: int = 0,
    ) -> None:
        self._client = client
        self._board = board or MetricsBoard()
        self._period_s = silence_s / _PER_PATIENCE
        self._on_news = on_news
        self._on_chief = on_chief
        self._told = told
        self._stopped = threading.Event()
        self.error: ASGDError | None = None
        """Why the session was ended, once it was."""
        self._thread = threading.Thread(target=self._run, name="lightning_asgd.heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send no more. Returns when the thread has ended."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        restored = 0
        while not self._stopped.wait(self._period_s):
            if self._client.connection.restored[COORDINATOR] != restored:  # this one's news begin anew
                restored, self._told = self._client.connection.restored[COORDINATOR], 0
            try:
                beaten = self._client.beat(self._told, self._period_s, self._board.mine)
            except ASGDError as error:
                self.error = self.error or error
                return
            if beaten is None:
                continue
            self._on_chief(beaten.chief)
            self._board.hear(beaten.figures, beaten.living)
            self._told += len(beaten.news)
            for line in beaten.news:
                if self._on_news is not None:
                    self._on_news(line)
