"""``compression="auto"``: a worker measures, over a transport within this process, and chooses its code."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.futures import Future

from lightning_asgd import Advanced
from lightning_asgd.algorithms import StreamingDiLoCo
from lightning_asgd.compression import link_probe
from lightning_asgd.compression.link_probe import measured_code
from lightning_asgd.compression.messages import LinkProbe, LinkProbed
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.calls.shared_memory import host_identity
from lightning_asgd.core.foundation.layout import Layout
from lightning_asgd.core.protocol import Exchange, InitShard, nbytes
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.setup import set_up
from lightning_asgd.core.worker.synchronizer import run
from tests.helpers.cluster import Cluster, layout_of_floats, summary

pytestmark = pytest.mark.skipif(not host_identity(), reason="processes of this system share no memory")

VALUES = 1_000_000


class Clock:
    """Time passes only while bytes are on a cable: on a busy machine it would for other reasons, too."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "time", Clock())


class Cables(InProcessTransport):
    """Servers on other machines, whose cables carry this number of bytes per second; None: on this machine."""

    def __init__(self, cluster: Cluster, *speeds: float | None) -> None:
        super().__init__([service.handle for service in cluster.services])
        self.speeds = speeds
        self.log: list[tuple[int, Any]] = []

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        self.log.append((server, message))
        speed = self.speeds[server]
        if speed is not None and isinstance(message, InitShard):
            message = replace(message, shared=None)
        future = super().call(server, message, timeout_s)
        if speed is None or not isinstance(message, LinkProbe):
            return future
        answer: LinkProbed = future.value()
        echoed = 0 if answer.payload is None else len(answer.payload)
        link_probe.time.seconds += (len(message.payload) + echoed) / speed  # type: ignore[attr-defined]
        elsewhere: Future[Any] = Future()
        elsewhere.set_result(replace(answer, host=f"machine {server}"))
        return elsewhere

    @property
    def probed(self) -> dict[int, int]:
        """The most bytes of a probe, by server."""
        found: dict[int, int] = {}
        for server, message in self.log:
            if isinstance(message, LinkProbe):
                found[server] = max(found.get(server, 0), len(message.payload))
        return found


def joined(*speeds: float | None) -> tuple[Cluster, Cables, SessionClient]:
    cluster = Cluster(len(speeds))
    cluster.transport = cables = Cables(cluster, *speeds)
    client = cluster.client()
    client.join()
    return cluster, cables, client


def layout(servers: int = 1) -> Layout:
    return layout_of_floats(VALUES, servers)


def test_a_server_answers_a_probe_and_changes_nothing() -> None:
    cluster, _, client = joined(None)
    before = summary(cluster.services[0])
    payload = torch.arange(5, dtype=torch.uint8)
    for echo in (False, True):
        answer = client.connection.ask(0, LinkProbe(*client.connection.sender, payload, echo))
        assert answer.host == host_identity()
        assert (answer.payload is not None) is echo
    assert answer.payload.tolist() == payload.tolist()
    assert summary(cluster.services[0]) == before


def test_nothing_is_measured_where_all_servers_are_on_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, cables, client = joined(None, None)
    assert measured_code(client.connection, layout(2)) is None
    assert cables.probed == {0: 0, 1: 0}
    assert "compression='auto' on worker 0: no codec (all servers are on its machine)." in caplog.text


def test_a_slow_link_is_found_and_a_code_of_few_bits_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, cables, client = joined(4e6)
    state = torch.get_rng_state()
    assert repr(measured_code(client.connection, layout())) == "Float4()"
    assert link_probe.time.perf_counter() < 1.5
    assert torch.equal(torch.get_rng_state(), state)
    assert cables.probed == {0: 1 << 18}
    said = caplog.messages[-1]
    assert said.startswith("compression='auto' on worker 0: 4bit, because the link carries ")
    there, back = (float(part.split()[-1]) for part in said.split(" MB/s", 2)[:2])
    assert there == pytest.approx(4.0, rel=0.2)
    assert back == pytest.approx(4.0, rel=0.2)
    assert "s with no codec" in said
    assert "s with 4bit" in said


def test_a_fast_link_is_measured_with_many_bytes() -> None:
    _, cables, client = joined(2e9)
    measured_code(client.connection, layout())
    assert cables.probed == {0: 1 << 24}


def test_the_slowest_of_two_other_machines_decides(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _, cables, client = joined(None, 50e6, 4e6, 1e6)
    measured_code(client.connection, layout(4))
    assert cables.probed[0] == cables.probed[3] == 0
    assert float(caplog.messages[-1].partition("carries ")[2].split()[0]) == pytest.approx(4.0, rel=0.2)


def test_the_largest_fragment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(link_probe, "measured_code", lambda _, layout: measured.append(layout.nbytes))
    cluster, _, client = joined(None)
    module = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 30), torch.nn.Linear(30, 40, bias=False))
    config = ExchangeConfig.create(nsync=8, algorithm=StreamingDiLoCo(parts=3), compression="auto")
    set_up(client, Collectives(), module, config).close()
    cluster.close()
    assert measured == [4 * 30 * 40]


def test_a_code_that_finds_nothing_to_compress_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cluster, _, client = joined(None)
    module = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
    set_up(client, Collectives(), module, ExchangeConfig.create(nsync=1, compression="int8")).close()
    cluster.close()
    assert "or in float64, and finds bfloat16." in caplog.text


@pytest.mark.parametrize("speed", [None, 4e6])
def test_a_worker_sets_up_with_what_it_has_chosen(speed: float | None) -> None:
    cluster, cables, client = joined(speed)
    module = torch.nn.Linear(300, 300)
    config = ExchangeConfig.create(nsync=1, advanced=Advanced(overlap=False), compression="auto")
    synchronizer = set_up(client, Collectives(), module, config)
    run(synchronizer.begin())
    for _ in range(2):
        with torch.no_grad():
            module.weight += torch.randn(300, 300)
        synchronizer.count_step()
        run(synchronizer.advance())
    sent = [message for _, message in cables.log]
    first = next(message for message in sent if isinstance(message, InitShard))
    assert (first.compression is None) is (speed is None)
    assert first.restorable is False
    pushes = [message.update for message in sent if isinstance(message, Exchange) and message.push]
    if speed is None:
        assert pushes == [None, None]  # they are in shared memory
    else:
        assert max(map(nbytes, pushes)) < 300 * 300  # of four bytes
    assert not cluster.services[0].replaceable
    synchronizer.close()
    cluster.close()
