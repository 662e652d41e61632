"""A worker's way into a session."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd.algorithms import StreamingDiLoCo
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.protocol import Exchange
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.setup import set_up
from lightning_asgd.core.worker.synchronizer import Synchronizer, Training, WorkFeed, run
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


def test_a_worker_that_was_away_gives_up_its_steps_of_all_fragments() -> None:
    """Others train the data of these steps."""
    now = [0.0]
    cluster = Cluster(clock=lambda: now[0])
    config = ExchangeConfig.create(nsync=4, algorithm=StreamingDiLoCo(parts=2))
    client = cluster.client()
    client.join()
    module = torch.nn.Linear(2, 2)
    synchronizer = set_up(client, Collectives(), module, config, Training(data=Trained()))
    run(synchronizer.begin())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    session = cluster.services[0].session
    assert session is not None
    with torch.no_grad():
        for _ in range(2):  # the first fragment is exchanged with the second step, the other one two steps later
            for parameter in module.parameters():
                parameter += 1.0
            synchronizer.count_step()
        session.members.suspected[0] = "it sent no heartbeat"
        run(synchronizer.advance())
        run(synchronizer.flush())
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(tensor, before[name])
    assert synchronizer.unacknowledged == 0


def test_what_servers_kept_of_other_fragments_is_not_restored(caplog: pytest.LogCaptureFixture) -> None:
    def synchronizer_of(parts: int, module: torch.nn.Module) -> Synchronizer:
        client = Cluster().client()
        client.join()
        config = ExchangeConfig.create(nsync=4, algorithm=StreamingDiLoCo(parts=parts))
        return set_up(client, Collectives(), module, config)

    two = synchronizer_of(2, torch.nn.Linear(2, 2))
    state = two.state()
    two.restore(state)
    assert not caplog.messages
    for other in (synchronizer_of(1, torch.nn.Linear(2, 2)), synchronizer_of(2, torch.nn.Linear(2, 3))):
        other.restore(state)
    assert [message.startswith("The checkpoint was written with other fragments") for message in caplog.messages] == [
        True,
        True,
    ]
