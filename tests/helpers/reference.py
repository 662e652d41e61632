"""What a script of steps, arrivals and answers must lead to: asynchronous SGD in one thread, on whole vectors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Flight:
    update: Tensor | None  # None if nothing is pushed
    fetch: bool
    got: dict[int, Tensor] = field(default_factory=dict)  # by server, once the message has arrived
    answered: set[int] = field(default_factory=set)


class Reference:
    """All servers and workers. ``bounds`` are the servers' ranges of the vector, ``factor`` scales every update."""

    def __init__(self, start: Tensor, bounds: list[slice], factor: float, workers: int, nfetch: int, npush: int):
        self.server, self.bounds, self.factor = start.clone(), bounds, factor
        self.nfetch, self.npush = nfetch, npush
        self.x = [start.clone() for _ in range(workers)]
        self.base = [start.clone() for _ in range(workers)]
        self.since = [[0, 0] for _ in range(workers)]  # steps since the last push, since the last fetch
        self.flight: list[Flight | None] = [None] * workers

    def step(self, i: int, change: Tensor) -> None:
        self.x[i] = self.x[i] + change
        self.since[i] = [n + 1 for n in self.since[i]]

    def advance(self, i: int) -> None:
        if self.flight[i] is not None and len(self.flight[i].answered) == len(self.bounds):
            self.finish(i)
        push, fetch = self.since[i][0] >= self.npush, self.since[i][1] >= self.nfetch
        if self.flight[i] is None and (push or fetch):
            self.start(i, push, fetch)

    def start(self, i: int, push: bool, fetch: bool) -> None:
        self.flight[i] = Flight(self.x[i] - self.base[i] if push else None, fetch)
        if push:
            self.base[i] = self.base[i] + self.flight[i].update
        self.since[i] = [0 if push else self.since[i][0], 0 if fetch else self.since[i][1]]

    def arrive(self, i: int, server: int) -> None:
        flight, part = self.flight[i], self.bounds[server]
        if flight is not None and server not in flight.got:
            if flight.update is not None:
                self.server[part] = self.server[part] + self.factor * flight.update[part]
            flight.got[server] = self.server[part].clone()

    def answer(self, i: int, server: int) -> None:
        if self.flight[i] is not None and server in self.flight[i].got:
            self.flight[i].answered.add(server)

    def finish(self, i: int) -> None:
        flight, self.flight[i] = self.flight[i], None
        if flight is not None and flight.fetch:
            fetched = torch.cat([flight.got[s] for s in range(len(self.bounds))])
            self.x[i] = self.x[i] + (fetched - self.base[i]) if self.since[i][0] else fetched.clone()
            self.base[i] = fetched

    def flush(self, i: int) -> None:
        for more in (True, self.since[i][0] > 0):
            if not more:
                continue
            for server in range(len(self.bounds)):
                self.arrive(i, server)
            self.finish(i)
            if self.since[i][0]:
                self.start(i, True, False)
