"""When a worker exchanges with the servers, and what it does with the answer.

The training thread drives everything: at the start of a batch it merges an answer that has come and, if enough steps
were taken, starts the next exchange. Sending and receiving happen in the transport's own threads meanwhile. At most one
exchange is under way: one that falls due earlier is put off until the answer is there (its steps go into the next
push), so a slow network never stops the training, up to ``max_offline_steps``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.futures import Future

from lightning_asgd.config import ExchangeConfig
from lightning_asgd.messages import Reply, Verdict
from lightning_asgd.stats import ExchangeRecord, ExchangeStats
from lightning_asgd.worker.client import Client
from lightning_asgd.worker.replica import Replica

__all__ = ["Exchanger"]


@dataclass
class _Pending:
    futures: list[Future[Any]]
    push: bool
    fetch: bool
    begun: float
    step: int
    local_steps: int


class Exchanger:
    """Drives the exchange of one worker.

    Args:
        client: connection to the servers, joined and initialised.
        replica: the worker's weights.
        config: when to exchange.
        on_refused: called after a server refused an update; the weights are the servers' again by then.
        clock: seconds; given by tests.
    """

    def __init__(
        self,
        client: Client,
        replica: Replica,
        config: ExchangeConfig,
        *,
        on_refused: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.client = client
        self.replica = replica
        self.config = config
        self.stats = ExchangeStats()
        self.versions = [0] * client.num_servers
        self.moved = False  # whether steps were taken since the last :meth:`fetch`
        self._on_refused = on_refused
        self._clock = clock
        self._seq = 0
        self._since_push = 0
        self._since_fetch = 0
        self._pending: _Pending | None = None

    # ------------------------------------------------------------------ the asynchronous phase

    def count_step(self) -> None:
        """Note that an optimizer step was taken."""
        self.moved = True
        self.stats.steps += 1
        self._since_push += 1
        self._since_fetch += 1

    def advance(self) -> None:
        """Merge what has come, and start an exchange if one is due. To be called between two batches.

        Raises:
            ServerLostError: a server is gone.
            ASGDError: what a server reported.
        """
        pending = self._pending
        if pending is not None and all(f.done() for f in pending.futures):
            self._finish()
        push = self._since_push >= self.config.npush
        fetch = self._since_fetch >= self.config.nfetch
        if not (push or fetch):
            return
        if self._pending is not None:
            self.stats.deferred += 1
            if self._since_push < self.config.max_offline_steps:
                return
            self._finish()
        self._start(push=push, fetch=fetch)
        if not self.config.overlap:
            self._finish()

    # ------------------------------------------------------------------ sync points

    def flush(self) -> None:
        """Wait for the exchange under way, and push what was trained since."""
        self._finish(sync=True)
        if self._since_push:
            self._start(push=True, fetch=False)
            self._finish(sync=True)

    def fetch(self) -> None:
        """Take the servers' weights as they are. What was not flushed is lost."""
        self._finish(sync=True)
        self._start(push=False, fetch=True)
        self._finish(adopt=True, sync=True)
        self.moved = False

    def peek(self) -> dict[str, Tensor]:
        """The servers' present weights by name; neither the module nor the exchange is touched."""
        self._finish()
        replies = self.client.replies(
            self.client.exchange(self._seq, self.versions, push=False, fetch=True, updates=self.replica.updates())
        )
        return self.replica.read(self._answers(replies))

    def close(self) -> None:
        """Forget the exchange under way and give the buffers back."""
        self._pending = None
        self.replica.close()

    # ------------------------------------------------------------------ one exchange

    def _start(self, *, push: bool, fetch: bool) -> None:
        local_steps = self._since_push if push else 0
        begun = self._clock()
        if push:
            self._seq += 1
            self.replica.pack()
            self._since_push = 0
        if fetch:
            self._since_fetch = 0
        futures = self.client.exchange(self._seq, self.versions, push=push, fetch=fetch, updates=self.replica.updates())
        self._pending = _Pending(futures, push, fetch, begun, self.stats.steps, local_steps)

    def _finish(self, *, adopt: bool = False, sync: bool = False) -> None:
        pending = self._pending
        if pending is None:
            return
        waiting_since = self._clock()
        self._pending = None
        replies = self.client.replies(pending.futures)
        wait_s = self._clock() - waiting_since
        refused = any(r.verdict is Verdict.REFUSED for r in replies)
        if pending.fetch:
            # The versions move on only with the weights: a push is as stale as the weights it was trained from.
            self.versions = [r.version for r in replies]
            if adopt or refused or self._since_push == 0:
                self.replica.adopt(self._answers(replies))
            else:
                self.replica.merge(self._answers(replies))
        self._record(pending, replies, wait_s, sync)
        if refused:
            self._since_push = 0
            if not pending.fetch:
                self.fetch()
            self._on_refused()

    def _answers(self, replies: list[Reply]) -> list[tuple[Tensor, ...]]:
        return [
            reply.weights if reply.weights is not None else wire
            for reply, wire in zip(replies, self.replica.wire, strict=True)
        ]

    def _record(self, pending: _Pending, replies: list[Reply], wait_s: float, sync: bool) -> None:
        nbytes = self.replica.layout.nbytes
        record = ExchangeRecord(
            step=pending.step,
            versions=tuple(r.version for r in replies),
            staleness=tuple(r.staleness for r in replies),
            verdicts=tuple(r.verdict for r in replies),
            round_trip_s=self._clock() - pending.begun,
            wait_s=0.0 if sync else wait_s,
            bytes_pushed=nbytes if pending.push else 0,
            bytes_fetched=nbytes if pending.fetch else 0,
            local_steps=pending.local_steps,
            shared=any(block is not None for block in self.replica.blocks),
        )
        self.stats.sync_wait_s += wait_s if sync else 0.0
        self.stats.add(record, pushed=pending.push, fetched=pending.fetch)
