"""A worker's way into a session."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd.algorithms import StreamingDiLoCo
from lightning_asgd.config import ExchangeConfig
from lightning_asgd.protocol import Exchange
from lightning_asgd.transports.transport import Transport
from lightning_asgd.worker.collectives import Collectives
from lightning_asgd.worker.synchronizer import Training, WorkFeed, run
from lightning_asgd.worker.worker_setup import set_up
from tests.helpers.cluster import Cluster


class Log(Transport):
    """Notes what passes on the way to another transport."""

    def __init__(self, to: Transport) -> None:
        self._to = to
        self.messages: list[Any] = []

    @property
    def num_servers(self) -> int:
        return self._to.num_servers

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        self.messages.append(message)
        return self._to.call(server, message, timeout_s)

    def close(self) -> None:
        self._to.close()


class Trained(WorkFeed):
    batch = 4

    @property
    def trained(self) -> tuple[str, int]:
        return "fit/0", 3


@pytest.mark.parametrize(("parts", "told"), [(1, ("fit/0", 3)), (2, ("", 0))])
def test_a_push_counts_units_only_where_it_is_of_the_whole_module(parts: int, told: tuple[str, int]) -> None:
    """With fragments a unit is done when all of them have it."""
    cluster = Cluster()
    cluster.transport = log = Log(cluster.transport)
    config = ExchangeConfig.create(nsync=1, algorithm=StreamingDiLoCo(parts=parts))
    client = cluster.client()
    client.join()
    synchronizer = set_up(client, Collectives(), torch.nn.Linear(2, 2), config, Training(data=Trained()))
    run(synchronizer.begin())
    for _ in range(2):
        synchronizer.count_step()
        run(synchronizer.advance())
    run(synchronizer.flush())
    synchronizer.close()
    cluster.close()
    pushes = [message for message in log.messages if isinstance(message, Exchange) and message.push]
    assert len(pushes) >= parts
    assert {(push.epoch, push.units) for push in pushes} == {told}
    assert {push.batch for push in pushes} == {4}
