"""Whatever is late on a device, at whichever place of a stream's queue: the weights have the same bits.

The device is :mod:`tests.helpers.late_device`. Two things are run on it with many delays: a replica through scripts of
what an exchange consists of, beside a replica on a CPU; and workers with servers through scripts of steps and messages,
beside the same without delays. Then each wait and each event of a lane is taken away, and these runs must notice.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asgd import Advanced
from lightning_asgd.algorithms import ASGD, EASGD, Downpour
from lightning_asgd.core.algorithms.base import Algorithm, Payload
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.worker import replica as replica_module
from lightning_asgd.core.worker import replica_spans
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.replica_kinds import MixingReplica, replica_for
from lightning_asgd.core.worker.synchronizer import run
from lightning_asgd.devices import device_staging
from lightning_asgd.devices.device_staging import DeviceLane
from tests.component.test_exchange import CAN_SHARE, NEEDS_SHARED_MEMORY, Scripted
from tests.helpers.cluster import Cluster
from tests.helpers.late_device import DEVICE, LateDevice
from tests.helpers.script import ScriptedTransport, bits

SEEDS = range(8)
ALGORITHMS: tuple[Algorithm, ...] = (ASGD("sum"), ASGD("mean"), Downpour(lr=0.1), EASGD())
Delays = Callable[[Random], int]
PATTERNS: dict[str, Delays] = {
    "long or none": lambda random: random.choice((0, 0, 1000)),
    "any": lambda random: random.randrange(40),
    "rare": lambda random: 1000 * (random.random() < 0.1),
}


staging: Any = device_staging  # or what a mutation has made of it


def module_of(device: LateDevice) -> Any:
    """The device, in the place of a module of torch's."""
    return device


def delays(seed: int, pattern: Delays) -> Iterator[int]:
    random = Random(seed)
    while True:
        yield pattern(random)


def no_delays() -> Iterator[int]:
    return itertools.repeat(0)


@pytest.fixture(autouse=True)
def many_small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_spans, "_DEVICE_CHUNK", 32)
    monkeypatch.setattr(replica_spans, "_DEVICE_SMALL", 8)


def until_arrived(lane: DeviceLane | None, device: LateDevice | None) -> None:
    """What a worker does until it may send: it trains, and looks after every step."""
    while lane is not None and not lane.arrived:
        assert device is not None
        device.tick(100)


# ---------------------------------------------------------------------- a replica


class Copies:
    """A module's tensors and its replica, on a device or, without one, on the CPU."""

    def __init__(
        self, device: LateDevice | None, random: Random, *, shared: bool, lane: bool = True, offload: bool = False
    ) -> None:
        self.device, self.shared, self.packed = device, shared, False
        self.seen: list[bytes] = []
        place = (lambda values: values) if device is None else device.on_device
        torch.manual_seed(random.randrange(1000))
        values = {"a": torch.randn(7, 5), "b": torch.randn(3), "c": torch.randn(2), "d": torch.randn(40)}
        self.module: dict[str, Tensor] = {name: place(value) for name, value in values.items()}
        self.module["a"] = self.module["a"].t()  # strided
        layout = build_layout(self.module.items(), 2)
        blocks = [shared_memory.create(layout.shard(s)) if shared else None for s in range(2)]
        self.lane = staging.DeviceLane(DEVICE, module_of(device)) if device is not None and lane else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replica_module, "lane_for", lambda _: self.lane)
            places = [(self.module, spec.name) for spec in layout.tensors]
            among = [each for each in ALGORITHMS if not (offload and each.payload is Payload.GRADIENT)]
            algorithm = random.choice((*among, None))
            if algorithm is None:
                self.replica: Replica = MixingReplica(0.3, layout, places, blocks, remembers=True, offload=offload)
            else:
                how = {"remembers": random.random() < 0.5, "offload": offload}
                self.replica = replica_for(algorithm, layout, places, blocks, **how)
        self.replica.adopt(self.answers(random, wire=False))

    def answers(self, random: Random, wire: bool) -> Sequence[tuple[Tensor, ...]]:
        torch.manual_seed(random.randrange(10**6))
        made = [tuple(torch.randn(t.shape) for t in shard) for shard in self.replica.wire]
        if not wire:
            return made
        for shard, answer in zip(self.replica.wire, made, strict=True):
            for target, value in zip(shard, answer, strict=True):
                target.copy_(value)
        return self.replica.wire

    def train(self, random: Random) -> None:
        for tensor in self.module.values():
            tensor.grad = tensor * 0.5
            tensor.mul_(random.uniform(0.8, 1.1)).add_(0.1)
        self.replica.accrue()

    def see(self, tensors: Iterator[Tensor] | Sequence[Tensor]) -> None:
        self.seen += [bits(tensor.detach().cpu()) for tensor in tensors]

    def do(self, action: str, random: Random) -> None:
        never = self.device.blocked if self.device is not None else 0
        if action == "train":
            self.train(random)
        elif action == "pack":
            self.replica.pack()
            self.packed = True
            self.train(random)
        elif action == "send" and self.packed:
            until_arrived(self.lane, self.device)
            self.see([t for shard in self.replica.wire for t in shard])
        elif action == "merge":
            if self.shared:
                until_arrived(self.lane, self.device)
            self.replica.merge(self.answers(random, wire=self.shared), pushed=random.random() < 0.7)
            self.replica.took_s()
        elif action == "fetched" and self.replica.remembers:
            self.see([t for s in range(2) for t in self.replica.fetched(s)])
        elif action == "adopt":
            until_arrived(self.lane, self.device)
            self.replica.adopt(self.answers(random, wire=self.shared))
        if action in ("train", "pack", "merge") and self.device is not None and self.lane is not None:
            assert self.device.blocked == never, f"the training thread waited for a copy in {action}"

    def end(self) -> list[bytes]:
        self.see([*self.module.values()])
        self.replica.close()
        return self.seen


def script_of(seed: int) -> list[str]:
    random = Random(f"script {seed}")
    actions = ["train"] * 3 + ["pack"] * 3 + ["send"] * 3 + ["merge"] * 4 + ["fetched", "adopt"]
    return [random.choice(actions) for _ in range(25)]


def replica_run(seed: int, late: Iterator[int] | None, **about: Any) -> list[bytes]:
    """What a replica has sent and holds in the end."""
    with contextlib.ExitStack() as stack:
        device = None if late is None else stack.enter_context(LateDevice(late, cuda=seed % 4 < 2))
        random = Random(f"replica {seed}")
        copies = Copies(device, random, shared=CAN_SHARE and seed % 2 == 1, **about)
        for action in script_of(seed):
            copies.do(action, random)
        return copies.end()


def check_replicas(seeds: Sequence[int], **about: Any) -> None:
    for seed in seeds:
        expected = replica_run(seed, None, **about)
        for pattern in PATTERNS.values():
            assert replica_run(seed, delays(seed, pattern), **about) == expected, f"script {seed}"


# ---------------------------------------------------------------------- workers and servers


def scripted_lane(device: LateDevice, random: Random) -> DeviceLane:
    """Has arrived when the script says so, and the program looks until it has: so the order of messages is the same."""

    class ScriptedLane(staging.DeviceLane):  # type: ignore[misc, name-defined]
        @property
        def arrived(self) -> bool:
            if self._latest is not None and random.random() < 0.4:
                return False
            while not super().arrived:
                device.tick(100)
            return True

    return ScriptedLane(DEVICE, module_of(device))


class LateWorker(Scripted):
    """A worker whose weights are on the device."""

    def __init__(self, device: LateDevice, cluster: Cluster, rank: int, seed: int, **about: Any) -> None:
        cluster.transport = self.wire = ScriptedTransport([s.handle for s in cluster.services])
        self.w, self.refused = device.on_device(torch.tensor([0.1, 0.2, -0.3, 0.7, 1.0])), 0
        lane = scripted_lane(device, Random(f"arrived {seed} {rank}"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replica_module, "lane_for", lambda _: lane)
            self.exchanger = cluster.enter(rank, {"w": self.w}, on_refused=self._count, **about)
        self.wire.hold()


def run_of_workers(seed: int, late: Iterator[int]) -> list[bytes]:
    """The weights of two workers after every fetch of all, and in the end."""
    random = Random(f"workers {seed}")
    seen = []
    rules = {
        "nsync": 1,
        "advanced": Advanced(npush=random.choice((1, 2)), nfetch=random.choice((1, 2)), max_offline_steps=10**6),
    }
    algorithm = ALGORITHMS[seed % len(ALGORITHMS)]
    shared = CAN_SHARE and seed % 3 > 0
    cluster = Cluster(random.choice((1, 2)), 2)
    with LateDevice(late, cuda=seed % 2 == 0) as device:
        team = [LateWorker(device, cluster, r, seed, shared=shared, algorithm=algorithm, **rules) for r in range(2)]
        for _ in range(40):
            worker = team[random.randrange(2)]
            action = random.choice(["step"] * 5 + ["deliver"] * 3 + ["flush", "fetch", "peek", "catch up", "rejoin"])
            if action == "step":
                worker.w.grad = worker.w * 0.3
                worker.step(random.uniform(-1, 1))
                continue
            worker.wire.deliver()
            worker.wire.release()
            if action in ("flush", "fetch"):
                run(worker.exchanger.flush())
            if action == "fetch":
                run(worker.exchanger.fetch(park=True))
                seen.append(bits(worker.w.cpu()))
                run(worker.exchanger.begin())
            elif action == "peek":
                seen += [bits(value) for value in worker.exchanger.peek().values()]
            elif action == "catch up":
                seen += [bits(value) for value in worker.exchanger.catch_up().values()]
            elif action == "rejoin":
                run(worker.exchanger.come_back())
            worker.wire.hold()
        for worker in team:
            worker.wire.release()
            run(worker.exchanger.flush())
        for worker in team:
            run(worker.exchanger.fetch())
            seen.append(bits(worker.w.cpu()))
            worker.exchanger.close()
    cluster.close()
    return seen


def check_workers(seeds: Sequence[int]) -> None:
    for seed in seeds:
        expected = run_of_workers(seed, no_delays())
        for pattern in PATTERNS.values():
            assert run_of_workers(seed, delays(seed, pattern)) == expected, f"script {seed}"


# ---------------------------------------------------------------------- the properties


def check_overlap() -> None:
    """Answers are on the device while that still trains."""
    with LateDevice(no_delays()) as device:
        lane = staging.DeviceLane(DEVICE, module_of(device))
        weights = device.on_device(torch.zeros(4))
        device.delays = itertools.chain([1000], no_delays())
        weights += 1
        ((near,),) = lane.bring([(torch.ones(4),)])
        assert device.blocked == 0
        assert near.raw.tolist() == [1.0] * 4
        assert weights.raw.tolist() == [0.0] * 4


def check_close() -> None:
    """A shared block is given back once the device no longer reads or writes it."""
    for cuda in (True, False):
        with LateDevice(itertools.repeat(1000), cuda=cuda) as device:
            copies = Copies(device, Random(0), shared=True)
            copies.replica.pack()
            copies.replica.close()
            assert not device.host_memory()


def test_a_late_device_packs_and_merges_what_a_cpu_does() -> None:
    check_replicas(SEEDS)


def test_so_it_does_with_offload() -> None:
    check_replicas(SEEDS, offload=True)


@pytest.mark.parametrize("algorithm", [ASGD(), EASGD(), None])
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=NEEDS_SHARED_MEMORY)])
def test_offload_takes_one_chunk_of_the_device_at_most(algorithm: Algorithm | None, shared: bool) -> None:
    """Without it a device holds a vector as long as the parameters, and while it merges two."""
    peaks = {}
    for offload in (False, True):
        with LateDevice(no_delays()) as device, pytest.MonkeyPatch.context() as patch:
            module = {name: device.on_device(torch.randn(n)) for name, n in (("a", 2000), ("b", 3), ("c", 5))}
            layout = build_layout(module.items(), 2)
            blocks = [shared_memory.create(layout.shard(s)) if shared else None for s in range(2)]
            patch.setattr(replica_module, "lane_for", lambda _, d=device: DeviceLane(DEVICE, module_of(d)))
            about = layout, [(module, spec.name) for spec in layout.tensors], blocks
            before = device.peak = device.held
            replica: Replica
            if algorithm is None:
                replica = MixingReplica(0.3, *about, offload=offload)
            else:
                replica = replica_for(algorithm, *about, offload=offload)
            answers = [tuple(torch.zeros_like(t) for t in shard) for shard in replica.wire]
            replica.adopt(answers)
            for _ in range(2):
                replica.pack()
                replica.merge(answers)
            peaks[offload] = device.peak - before
            replica.close()
            del replica
    vector, chunk = 4 * 2008, 4 * replica_spans._DEVICE_CHUNK
    assert peaks[False] >= vector
    assert 0 < peaks[True] <= chunk < vector / 10


def test_the_weights_of_workers_do_not_depend_on_what_is_late() -> None:
    check_workers(SEEDS)


def test_answers_are_copied_while_a_device_trains() -> None:
    check_overlap()


@NEEDS_SHARED_MEMORY
def test_a_block_is_closed_once_a_device_is_done_with_it() -> None:
    check_close()


def test_without_a_lane_a_device_that_copies_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as MPS: a copy that does not block would be sent before it is there."""
    monkeypatch.setattr(DeviceLane, "__init__", lambda *_: pytest.fail("a lane was made"))
    for seed in SEEDS:
        assert replica_run(seed, delays(seed, PATTERNS["any"]), lane=False) == replica_run(seed, None)


# ---------------------------------------------------------------------- what breaks them

SOURCE = Path(device_staging.__file__).read_text()
ORDERS = {  # by what a line has: what it becomes
    r"\S+\.wait_stream\(.*": "pass",
    r"\S+\.record\(.*": "pass",
    r"\S+\.synchronize\(\)": "pass",
    r"self\.wait\(\).*": "pass",
    r"self\._latest = end": "pass",
    r"bool\(self\._latest\.query\(\)\)": "True",
    r"self\._turns\[0\]\[1\]\.query\(\)": "True",
    r"with self\._module\.stream\(self\._stream\)": "if True",
}


def mutations() -> Iterator[Any]:
    """The file without one of its waits or events at a time."""
    lines = SOURCE.splitlines()
    for pattern, instead in ORDERS.items():
        numbers = [number for number, line in enumerate(lines) if re.search(pattern, line)]
        assert numbers, f"{pattern!r} is nowhere in device_staging.py: bring ORDERS up to date"
        for number in numbers:
            changed = [*lines[:number], re.sub(pattern, instead, lines[number]), *lines[number + 1 :]]
            yield pytest.param("\n".join(changed), id=lines[number].strip())


def check_all() -> None:
    check_overlap()
    check_close()
    check_replicas(SEEDS)
    check_workers(SEEDS)


@NEEDS_SHARED_MEMORY
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a mutant fails again at its end
@pytest.mark.parametrize("source", mutations())
def test_without_any_one_wait_or_event_it_shows(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = types.ModuleType(device_staging.__name__)
    exec(compile(source, "mutant", "exec"), vars(mutant))
    monkeypatch.setitem(globals(), "staging", mutant)
    with pytest.raises(AssertionError):
        check_all()
