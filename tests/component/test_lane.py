"""From a device and back: nothing is sent before it has arrived, nothing is lost, and training never waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asgd import Advanced
from lightning_asgd.algorithms import ASGD, EASGD, Downpour
from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.worker import replica as replica_module
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.synchronizer import run
from lightning_asgd.devices.device_staging import DeviceLane, lane_for
from tests.component.test_exchange import CAN_SHARE, NEEDS_SHARED_MEMORY, Scripted, Worker, pushes, scripted
from tests.helpers.cluster import Cluster

CPU = torch.device("cpu")
ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
HAS_STREAMS = ACCELERATOR is not None and ACCELERATOR.type != "mps"
NEEDS_STREAMS = pytest.mark.skipif(not HAS_STREAMS, reason="this machine has no accelerator with streams")
DEVICES = [CPU, pytest.param(ACCELERATOR, marks=[pytest.mark.device, NEEDS_STREAMS], id="accelerator")]


class LateLane(DeviceLane):
    """A turn is over at the so manieth look: until then there is NaN where an update is to be, and answers are read."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self._buffers: list[torch.Tensor] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._left = 0
        self._merges = False

    def buffer(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        self._buffers.append(torch.empty(length, dtype=dtype))
        return self._buffers[-1]

    def pin(self, block: shared_memory.SharedBlock) -> None:
        self._buffers += block.tensors

    def unpin(self, block: shared_memory.SharedBlock) -> None:
        pass

    def took_s(self) -> float:
        return 0.0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        merges, self._merges = self._merges, False
        if not merges:
            self.wait()  # one turn after the other
        yield
        self._left = self.looks
        if not merges:
            self._hidden = [(buffer, buffer.clone()) for buffer in self._buffers]
            for buffer in self._buffers:
                buffer.fill_(torch.nan)

    def bring(
        self, answers: Sequence[tuple[torch.Tensor, ...]], *, whole: bool = True
    ) -> Sequence[tuple[torch.Tensor, ...]]:
        self.wait()
        self._merges, self._read = True, [(t, t.clone()) for shard in answers for t in shard]
        return answers

    @property
    def arrived(self) -> bool:
        if self._left == 0:
            self.wait()
            return True
        self._left -= 1
        return False

    def wait(self) -> None:
        self._left = 0
        for buffer, content in self._hidden:
            assert buffer.isnan().all(), "written by others, or read, before it had arrived"
            buffer.copy_(content)
        for buffer, content in self._read:
            assert torch.equal(buffer, content), "overwritten while the device read it"
        self._hidden, self._read = [], []


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates arrive with the second look after the one when they were packed."""
    monkeypatch.setattr(replica_module, "lane_for", lambda _: LateLane(2))


def test_an_update_is_sent_after_the_step_in_which_it_has_arrived(late: None) -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=4, algorithm=ASGD("sum"))
    sent = []
    for _ in range(10):
        worker.step(1.0)
        sent.append(len(pushes(transport)))
    assert sent == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]  # due after steps 4 and 8
    assert worker.exchanger.unacknowledged == 2
    assert [m.update[0].tolist() for m in pushes(transport)] == [[4.0] * 4] * 2
    assert worker.exchanger.stats.deferred == 0
    run(worker.exchanger.flush())
    assert worker.exchanger.unacknowledged == 0
    run(worker.exchanger.fetch())
    assert worker.w.tolist() == [10.0] * 4
    assert [r.local_steps for r in worker.exchanger.stats.records if r.local_steps] == [4, 4, 2]


def test_an_exchange_that_falls_due_while_an_update_is_on_its_way_is_put_off(late: None) -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=1, algorithm=ASGD("sum"))
    for _ in range(3):
        worker.step(1.0)
    assert [m.update[0].tolist() for m in pushes(transport)] == [[1.0] * 4]
    assert worker.exchanger.stats.deferred == 1
    assert worker.exchanger.unacknowledged == 2  # the next is on its way already


def test_nobody_waits_longer_for_an_update_on_its_way_than_for_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "lane_for", lambda _: LateLane(100))
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=2, advanced=Advanced(max_offline_steps=5), algorithm=ASGD("sum"))
    for _ in range(7):
        worker.step(1.0)
    assert [m.update[0].tolist() for m in pushes(transport)] == [[2.0] * 4]
    run(worker.exchanger.flush())
    assert cluster.versions() == [2]


def test_what_is_on_its_way_is_lost_with_all_that_was_not_applied_when_a_worker_was_away(late: None) -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=2, algorithm=ASGD("sum"))
    for _ in range(2):
        worker.step(1.0)
    run(worker.exchanger.come_back())
    assert pushes(transport) == []
    assert worker.w.tolist() == [0.0] * 4
    for _ in range(4):
        worker.step(1.0)
    run(worker.exchanger.flush())
    run(worker.exchanger.fetch())
    assert worker.w.tolist() == [4.0] * 4


@NEEDS_SHARED_MEMORY
def test_a_checkpoint_within_an_epoch_waits_for_the_answer_that_the_device_still_reads(late: None) -> None:
    cluster = Cluster(1, 2)
    first, second = (Worker(cluster, rank, nsync=1, algorithm=ASGD("sum"), shared=True) for rank in range(2))
    first.step(1.0)
    for _ in range(2):
        run(first.exchanger.advance())  # it is sent, answered, and its answer merged
    assert first.exchanger.stats.exchanges == 1
    second.step(2.0)
    run(second.exchanger.flush())
    assert first.exchanger.peek()["w"].tolist() == [3.0] * 4
    first.exchanger.channels[0].replica.await_arrival()
    second.exchanger.close()
    first.exchanger.close()
    cluster.close()


def test_closing_forgets_what_is_on_its_way(late: None) -> None:
    cluster, transport = scripted()
    worker = Worker(cluster, nsync=1)
    worker.step(1.0)
    worker.exchanger.close()
    assert pushes(transport) == []


ACTIONS = ["step"] * 4 + ["advance"] * 2 + ["deliver"] * 2 + ["flush", "fetch", "peek", "come back"]


@given(
    script=st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ACTIONS)), max_size=60),
    looks=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    servers=st.integers(1, 2),
    npush=st.integers(1, 3),
    nfetch=st.integers(1, 3),
    algorithm=st.sampled_from([ASGD("sum"), Downpour(lr=0.01), EASGD()]),
    shared=st.booleans() if CAN_SHARE else st.just(False),
)
@settings(max_examples=200, deadline=None)
def test_every_step_is_in_the_weights_once_and_nobody_else_is_where_the_device_reads_or_writes(
    script: list[tuple[int, str]],
    looks: list[int],
    servers: int,
    npush: int,
    nfetch: int,
    algorithm: Algorithm,
    shared: bool,
) -> None:
    cluster = Cluster(servers, 3)
    lanes = iter(looks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_module, "lane_for", lambda _: LateLane(next(lanes)))
        rules = {
            "nsync": 1,
            "advanced": Advanced(npush=npush, nfetch=nfetch, max_offline_steps=10**6),
            "algorithm": algorithm,
        }
        team = [Scripted(cluster, rank, shared=shared, **rules) for rank in range(3)]
    for worker in team:
        worker.w.requires_grad_()
    start, total, lost = team[0].w.detach().clone(), 0.0, False
    for number, (rank, action) in enumerate(script):
        worker = team[rank]
        if action == "step":
            worker.w.grad = torch.full_like(worker.w, float(number))
            with torch.no_grad():
                worker.step(float(number))
            total += number
        elif action == "advance":
            run(worker.exchanger.advance())
        else:
            worker.wire.deliver()
            worker.wire.release()
            if action == "flush":
                run(worker.exchanger.flush())
            elif action == "fetch":
                run(worker.exchanger.flush())
                run(worker.exchanger.fetch(park=True))
                run(worker.exchanger.begin())
            elif action == "peek":
                assert all(value.isfinite().all() for value in worker.exchanger.peek().values())
            elif action == "come back":
                run(worker.exchanger.come_back())
                lost = True
            worker.wire.hold()
    for worker in team:
        worker.wire.release()
        run(worker.exchanger.flush())
    for worker in team:
        run(worker.exchanger.fetch())
        assert worker.w.isfinite().all()
        if isinstance(algorithm, ASGD) and not lost:
            torch.testing.assert_close(worker.w.detach(), start + total, rtol=0, atol=1e-3)
        worker.exchanger.close()
    cluster.close()


# ---------------------------------------------------------------------- on a device


@pytest.mark.parametrize("algorithm", [ASGD(), Downpour(), EASGD()], ids=lambda a: a.payload.value)
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_a_device_packs_and_merges_what_a_cpu_does(
    algorithm: Algorithm, device: torch.device, dtype: torch.dtype, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without one call that waits for it, but for the last: CUDA itself would raise."""
    wires, results = [], []
    for lane in (None, DeviceLane(device)):
        place = CPU if lane is None else device
        module = {"w": torch.arange(3000.0), "b": torch.arange(5.0)}
        module = {name: value.to(place, dtype) for name, value in module.items()}
        layout = build_layout(module.items(), 2)
        blocks = [shared_memory.create(layout.shard(s)) if shared else None for s in range(2)]
        for value in module.values():
            value.grad = torch.ones_like(value)
        monkeypatch.setattr(replica_module, "lane_for", lambda device, lane=lane: lane)
        replica = replica_for(algorithm, layout, [(module, name) for name in module], blocks)
        replica.adopt([tuple(torch.ones_like(t) for t in shard) for shard in replica.wire])
        pins = place.type == "cuda" or (place != CPU and not shared)  # others cannot pin what is there already
        assert not pins or all(t.is_pinned() for shard in replica.wire for t in shard if t.numel())
        with _never_waiting(place):
            _keep_busy(lane)
            for value in module.values():
                value += 2
            replica.accrue()
            replica.pack()
            assert place.type != "cuda" or not replica.arrived
            for value in module.values():
                value += 4  # trained meanwhile
        replica.await_arrival()
        assert replica.arrived
        wires.append([t.clone() for shard in replica.wire for t in shard])
        answers = [tuple(torch.full_like(t, 7.0, device=CPU) for t in shard) for shard in replica.wire]
        if shared:
            for shard, answer in zip(replica.wire, answers, strict=True):
                for wire, value in zip(shard, answer, strict=True):
                    wire.copy_(value)
            answers = list(replica.wire)
        with _never_waiting(place):
            _keep_busy(lane)
            replica.merge(answers)
            assert place.type != "cuda" or not replica.arrived
            for value in module.values():
                value *= 2  # trained after that
        results.append([value.cpu() for value in module.values()])
        assert (replica.took_s() > 0) == (place != CPU)
        replica.close()
    torch.testing.assert_close(wires[0], wires[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def _keep_busy(lane: DeviceLane | None) -> None:
    """Have both streams of a CUDA device begin late with what comes next, so that a wrong order shows."""
    if lane is not None and lane._device.type == "cuda":
        torch.cuda._sleep(20_000_000)
        with torch.cuda.stream(lane._stream):
            torch.cuda._sleep(20_000_000)


@contextlib.contextmanager
def _never_waiting(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Registry:
    """Takes the place of ``torch.cuda``, as far as memory is pinned."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self.broken = False
        self.device = contextlib.nullcontext

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(synchronize=self.synchronize)

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def cudart(self) -> Registry:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned += [] if self.error else [(address, nbytes)]
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        self.pinned = [entry for entry in self.pinned if entry[0] != address]
        return self.error


@NEEDS_SHARED_MEMORY
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_block_is_pinned_whole_and_no_longer_than_it_is_there(forgotten: bool) -> None:
    """Also where nobody gives it back since something failed: another one may come to lie at its address."""
    registry: Any = Registry()
    lane = DeviceLane(torch.device("meta"), registry)
    block = shared_memory.create(build_layout([("w", torch.zeros(100))], 1).shard(0))
    assert block is not None
    lane.pin(block)
    assert registry.pinned == [block.span]
    start, nbytes = block.span
    assert start < block.tensors[0].data_ptr() < start + nbytes
    if forgotten:
        del block
    else:
        lane.unpin(block)
        lane.unpin(block)
    assert registry.pinned == []
    assert registry.calls == ["synchronize", "unregister"]


@NEEDS_SHARED_MEMORY
def test_a_block_is_no_longer_pinned_also_where_the_device_has_failed() -> None:
    registry: Any = Registry()
    lane = DeviceLane(torch.device("meta"), registry)
    block = shared_memory.create(build_layout([("w", torch.zeros(100))], 1).shard(0))
    assert block is not None
    lane.pin(block)
    registry.broken = True
    lane.unpin(block)
    assert registry.pinned == []
    block.close()


def test_what_turns_took_is_forgotten_where_nobody_asks() -> None:
    lane = DeviceLane(CPU)
    for _ in range(1000):
        with lane.turn():
            pass
    assert len(lane._turns) < 100
    assert lane.took_s() == 0.0
    assert not lane._turns


@NEEDS_SHARED_MEMORY
def test_where_memory_cannot_be_pinned_there_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    registry: Any = Registry(error=2)
    lane = DeviceLane(torch.device("meta"), registry)
    block = shared_memory.create(build_layout([("w", torch.zeros(100))], 1).shard(0))
    assert block is not None
    lane.pin(block)
    lane.unpin(block)
    assert "could not be pinned: CUDA's error 2" in caplog.text
    assert registry.calls == ["synchronize"]  # copies that were queued may not have finished
    block.close()


@NEEDS_SHARED_MEMORY
def test_a_device_that_cannot_pin_what_exists_is_not_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    module: Any = SimpleNamespace(Stream=lambda _: SimpleNamespace(synchronize=lambda: calls.append("synchronize")))
    lane = DeviceLane(torch.device("meta"), module)
    block = shared_memory.create(build_layout([("w", torch.zeros(100))], 1).shard(0))
    assert block is not None
    lane.pin(block)
    lane.unpin(block)
    assert (calls, caplog.text) == (["synchronize"], "")
    block.close()


def test_only_devices_with_streams_have_a_lane_of_their_own() -> None:
    assert all(lane_for(torch.device(kind)) is None for kind in ("cpu", "mps", "meta", "xla"))


def test_every_module_with_streams_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As accelerators of other vendors bring them: torch.hpu, torch.npu, torch.musa."""
    asked: list[torch.device] = []
    parts = {"Stream": asked.append, "Event": None, "stream": None, "current_stream": None}
    monkeypatch.setattr(torch, "hpu", SimpleNamespace(**parts), raising=False)
    device = torch.device("hpu", 1)
    lane = lane_for(device)
    assert isinstance(lane, DeviceLane)
    assert asked == [device]
    for name in parts:
        lacking = {other: part for other, part in parts.items() if other != name}
        monkeypatch.setattr(torch, "hpu", SimpleNamespace(**lacking))
        assert lane_for(device) is None
