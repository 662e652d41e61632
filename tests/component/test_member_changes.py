"""Leases and shards are told which workers' parts have changed, and know the same of all as the membership does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol.lease import Epoch, OpenEpoch
from lightning_asgd.core.protocol.session import Attach, Heartbeat, Join, Leave, Policy, RunMetadata
from lightning_asgd.core.protocol.update import Exchange, InitShard
from lightning_asgd.core.server.service import Service

GROUPS = ((Role.PARAMETER, "float32", 2),)
SILENCE_S, MOST = 5.0, 12


class Crowd:
    """Workers that join, push, fall silent, rejoin and leave in random order."""

    def __init__(self, seed: int, *, elastic: bool) -> None:
        self.chance, self.elastic, self.now = random.Random(seed), elastic, 0.0
        self.service = Service(lambda: self.now, "s" if elastic else "")
        self.workers: dict[int, str] = {}  # and the processes that they are
        self.acts = self.epoch = 0
        self.suspected: set[int] = set()  # ever

    def send(self, kind: Any, worker: int, *about: Any, **options: Any) -> Any:
        return self.service.handle(kind("s", worker, *about, process=self.workers.get(worker, ""), **options))

    def enter(self) -> None:
        first, process = not self.workers, f"host/{self.acts}"
        if self.elastic:
            worker = self.service.handle(Attach("s", "here", Policy(SILENCE_S), process=process)).worker
        else:
            worker = self.chance.choice([each for each in range(MOST) if each not in self.workers])
        self.workers[worker] = process
        if not self.elastic:
            self.send(Join, worker, MOST, Policy(SILENCE_S, another_chief=True), replaces=True)
        self.send(InitShard, worker, GROUPS, ASGD(), (torch.zeros(2),) if first else None)
        if first and self.elastic:
            self.send(RunMetadata, worker, "founded", True)

    def act(self) -> None:
        self.acts += 1
        worker = self.chance.choice(sorted(self.workers))
        what = self.chance.choice(["enter", "push", "push", "push", "beat", "leave", "epoch", "rejoin", "time", "time"])
        if what == "enter" and len(self.workers) < MOST:
            self.enter()
        elif what == "push":
            batch = self.chance.choice([0.0, 8.0, 32.0])
            self.send(Exchange, worker, self.acts, 0, True, True, (torch.ones(2),), batch=batch)
        elif what == "beat":
            for each in self.workers:
                if self.chance.random() < 0.5:
                    self.send(Heartbeat, each)
        elif what == "leave" and len(self.workers) > 2:
            self.send(Leave, worker, "it was killed")
            del self.workers[worker]
        elif what == "epoch":
            self.epoch += self.chance.randrange(2)
            self.send(OpenEpoch, worker, Epoch(f"0/{self.epoch}", 100, (100,)))
        elif what == "rejoin":
            self.send(Join, worker, 0 if self.elastic else MOST, Policy(SILENCE_S), again=True)
        elif what == "time":
            self.now += self.chance.choice([0.1, 1.0, 1.9])
            self.service.tick()

    def check(self) -> None:
        session = self.service.session
        assert session is not None
        members, shard = session.members, session.shards[0]
        self.suspected |= set(members.suspected)
        for leases in self.service.state.epochs:
            assert vars(leases)["_living"] == members.trusted
        assert shard.table.living == members.living
        counted = {w for w in members.living if not self.elastic or w in shard.latest_push}
        sizes = vars(vars(shard)["_counted"])["_sizes"]
        assert sizes == {worker: shard.table.batches.get(worker, 0.0) * (1 << 52) for worker in counted}


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_they_know_the_same(seed: int, elastic: bool) -> None:
    crowd = Crowd(seed, elastic=elastic)
    crowd.enter()
    for _ in range(300):
        crowd.act()
        crowd.check()
    assert crowd.suspected
