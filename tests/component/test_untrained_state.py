"""Buffers and frozen parameters at sync points: all take the chief's, and the mean of running statistics."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_asgd.core.protocol import JointState, Policy, UntrainedState, codec
from lightning_asgd.core.protocol.reductions import reduce
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.module_state import persistent_buffers
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.untrained_state import UntrainedTensors, is_statistic
from tests.component.test_collectives import together
from tests.helpers.cluster import Cluster, run_workers
from tests.helpers.script import bits

LONG = 20_000  # of float32: more than is sent without a look


class Module(nn.Module):
    def __init__(self, **buffers: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.teacher = nn.Parameter(torch.arange(3.0), requires_grad=False)
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())


def share(collectives: Collectives, module: nn.Module, steps: int = 1) -> dict[str, Tensor]:
    UntrainedTensors(module, lambda: {"weight"}).share(collectives, steps)
    return persistent_buffers(module)


ROWS: dict[str, tuple[Any, ...]] = {
    "values": (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])),
    "infinities and NaN": (torch.tensor([-torch.inf, torch.nan]), torch.tensor([0.0, 1.0])),
    "flags that were lowered": (torch.tensor([False, True]), torch.tensor([True, True])),
    "a counter that is lower": (torch.tensor(3), torch.tensor(9)),
    "other shapes": (torch.ones(5, 2), torch.zeros(3)),
    "other dtypes": (torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bfloat16)),
    "long ones": (torch.ones(LONG), torch.zeros(LONG)),
    "long ones of other shapes": (torch.ones(LONG), torch.zeros(3)),
    "long ones of the other worker": (torch.ones(3), torch.zeros(LONG)),
    "sparse": (torch.eye(3).to_sparse(), torch.zeros(3, 3).to_sparse()),
    "complex": (torch.tensor([1j]), torch.tensor([2j])),
    "none": (torch.empty(0), torch.ones(2)),
    "one that the other lacks": (torch.ones(2), None),
    "a long one that the other lacks": (torch.ones(LONG), None),
}


@pytest.mark.parametrize("case", ROWS)
def test_all_take_the_chiefs_buffer(case: str) -> None:
    rows = ROWS[case]

    def work(collectives: Collectives, rank: int) -> Any:
        module = Module() if rows[rank] is None else Module(held=rows[rank])
        return share(collectives, module)["held"]

    for held in together(2, work):
        assert (held.shape, held.dtype) == (rows[0].shape, rows[0].dtype)
        assert bits(held.to_dense()) == bits(rows[0].to_dense())


def test_a_buffer_that_only_another_worker_has_stays_its_own() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        own = {"short": torch.ones(2), "long": torch.ones(LONG), "running_mean": torch.ones(2)}
        return {name: value.sum().item() for name, value in share(collectives, Module(**(own if rank else {}))).items()}

    assert together(2, work) == [{}, {"short": 2.0, "long": LONG, "running_mean": 2.0}]


def test_what_is_not_persistent_stays_each_workers_own() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module = Module()
        module.register_buffer("queue", torch.full((2,), float(rank)), persistent=False)
        share(collectives, module)
        return module.queue.tolist()

    assert together(2, work) == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(("differs", "sent"), [(False, []), (True, ["long"])])
def test_long_buffers_are_sent_only_where_workers_differ(differs: bool, sent: list[str]) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module = Module(long=torch.ones(LONG) * (1 + rank * differs), same=torch.zeros(LONG))
        with mock.patch.object(collectives, "broadcast_of_chief", wraps=collectives.broadcast_of_chief) as broadcast:
            share(collectives, module)
        return [name for call in broadcast.call_args_list for name in call.args[0]]

    assert together(2, work) == [sent, sent]


@pytest.mark.parametrize("changing", [0, 1])
def test_frozen_parameters_that_a_worker_changes_are_the_chiefs(changing: int) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module = Module()
        with torch.no_grad():
            module.weight.add_(rank)
            module.teacher.add_(10.0 * (rank == changing))
        share(collectives, module)
        return module.teacher.tolist(), module.weight.tolist()

    expected = [10.0, 11.0, 12.0] if changing == 0 else [0.0, 1.0, 2.0]
    assert together(2, work) == [(expected, [1.0, 1.0]), (expected, [2.0, 2.0])]


class Killed(Exception):
    """The worker's process was killed."""


@pytest.mark.parametrize("dies", ["before it reports", "before it sends the long ones"])
def test_if_the_chief_dies_the_next_one_gives_its_buffers(dies: str) -> None:
    policy, cluster = Policy(another_chief=True), Cluster(1, 3)
    clients = [SessionClient(cluster.client(rank).connection, policy=policy) for rank in range(3)]
    for client in clients:
        client.join()

    def work(rank: int) -> Any:
        collectives = Collectives(clients[rank], timeout_s=20.0)
        module = Module(held=torch.tensor(float(rank)), long=torch.full((LONG,), float(rank)))
        if rank == 0:
            last = "reduced" if dies == "before it reports" else "broadcast_of_chief"
            with mock.patch.object(collectives, last, side_effect=Killed), pytest.raises(Killed):
                share(collectives, module)
            clients[0].leave("it was killed")
            return None
        found = share(collectives, module)
        return found["held"].item(), found["long"].mean().item()

    # Short ones are the old chief's if it has reported them.
    assert run_workers(3, work)[1:] == [(1.0 if dies == "before it reports" else 0.0, 1.0)] * 2


def test_what_has_no_place_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module = Module(**({"held": torch.ones(1)} if rank == 0 else {}))
        if rank == 1:
            module.held = "an attribute"
        tensors = UntrainedTensors(module, lambda: {"weight"})
        for _ in range(2):
            tensors.share(collectives, 1)

    together(2, work)
    (record,) = caplog.records
    assert "no place for held, which the chief's module has" in record.getMessage()


# ---------------------------------------------------------------------- statistics


class Normed(nn.Module):
    """With batch norm, whose statistics are those of constant batches."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, counts: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=1.0, dtype=dtype)
        if not counts:
            self.norm.num_batches_tracked = None

    def see(self, mean: float, batches: int) -> None:
        for _ in range(batches):
            self.norm(torch.tensor([[mean - 1.0] * 2, [mean + 1.0] * 2], dtype=self.norm.running_mean.dtype))


def averaged(seen: list[tuple[float, int]], *, counts: bool = True, dtype: torch.dtype = torch.float32) -> list[Any]:
    """What workers have of the running mean and the counter after a sync point; per worker its mean and batches."""

    def work(collectives: Collectives, rank: int) -> Any:
        module = Normed(dtype, counts=counts)
        tensors = UntrainedTensors(module, lambda: dict(module.named_parameters()))
        module.see(*seen[rank])
        tensors.share(collectives, seen[rank][1])
        counter = module.norm.num_batches_tracked
        return module.norm.running_mean, None if counter is None else counter.item()

    return together(len(seen), work)


@pytest.mark.parametrize("counts", [True, False], ids=["by the layer's counter", "by steps"])
@pytest.mark.parametrize(
    ("seen", "mean"),
    [
        ([(1.0, 3), (6.0, 1)], 1.5),
        ([(1.0, 60), (0.0, 6)], pytest.approx(100 / 101)),  # the slow worker's are old
        ([(1.0, 1), (5.0, 0)], 1.0),
        ([(1.0, 0), (5.0, 2)], 5.0),
        ([(1.0, 0), (5.0, 0)], 0.0),
        ([(1.0, 1), (2.0, 1), (6.0, 1)], 3.0),
        ([(torch.nan, 2), (4.0, 1)], 4.0),
        ([(4.0, 1), (torch.inf, 2)], 4.0),
    ],
)
def test_running_statistics_are_averaged_by_the_squares_of_the_batches_seen(
    seen: list[tuple[float, int]], mean: float, counts: bool
) -> None:
    for found, counter in averaged(seen, counts=counts):
        assert found.tolist() == [mean, mean]
        assert counter == (seen[0][1] if counts else None)  # the chief's


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_statistics_keep_their_dtype(dtype: torch.dtype) -> None:
    for found, _ in averaged([(1.0, 1), (2.0, 1)], dtype=dtype):
        assert found.dtype is dtype
        assert found.tolist() == [1.5, 1.5]


def test_those_that_are_not_finite_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module = Normed()
        tensors = UntrainedTensors(module, lambda: dict(module.named_parameters()))
        for _ in range(2):
            module.see(torch.nan if rank == 1 else 1.0, 1)
            tensors.share(collectives, 1)

    with caplog.at_level(logging.WARNING):
        together(2, work)
    (record,) = caplog.records
    assert "norm.running_mean, norm.running_var of worker 1 hold NaN or infinity" in record.getMessage()


def test_batches_are_counted_from_one_sync_point_to_the_next_and_a_program_may_reset_the_counter() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module, found = Normed(), []
        tensors = UntrainedTensors(module, lambda: dict(module.named_parameters()))
        for turn, batches in enumerate([(8, 8), (1, 3), (0, 2)]):
            if turn == 2:
                module.norm.reset_running_stats()
            tensors.begin_interval(0)
            module.see(float(4 * rank), batches[rank])
            tensors.share(collectives, 0)
            found.append((module.norm.running_mean[0].item(), module.norm.num_batches_tracked.item()))
        return found

    assert together(2, work) == [[(2.0, 8), (pytest.approx(3.6), 9), (4.0, 0)]] * 2


def test_a_counter_of_any_dtype_and_form_is_read() -> None:
    class Counters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, counter in (("a", torch.tensor(2)), ("b", torch.tensor([3.0])), ("c", torch.empty(0))):
                layer = nn.Module()
                layer.register_buffer("num_batches_tracked", counter)
                setattr(self, name, layer)

    assert UntrainedTensors(Counters(), set)._counts() == {"a": 2.0, "b": 3.0}


def test_statistics_are_known_by_their_names() -> None:
    assert is_statistic("a.norm.running_mean", torch.zeros(1))
    assert is_statistic("running_var", torch.zeros(1, dtype=torch.complex64))
    assert not is_statistic("running_var", torch.zeros(1, dtype=torch.int64))
    assert not is_statistic("a.running_variance", torch.zeros(1))


# ---------------------------------------------------------------------- the reduction

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def joint(*reports: UntrainedState) -> JointState:
    state: JointState = reduce("state", dict(enumerate(reports))).value
    return state


def statistic(value: Tensor, seen: float = 1.0, **about: Any) -> UntrainedState:
    return UntrainedState({"v": (seen, value)}, **about)


@given(
    dtype=DTYPES,
    values=st.lists(st.floats(1e-6, 6e4), min_size=1, max_size=5),
    seen=st.lists(st.sampled_from([0, 1, 7, 1000, 10**12, math.inf, math.nan, -3]), min_size=5, max_size=5),
)
def test_positive_variances_stay_positive_and_between_those_of_the_workers(
    dtype: torch.dtype, values: list[float], seen: list[int]
) -> None:
    parts = [torch.tensor([value]).to(dtype) for value in values]
    reports = [statistic(part, float(n), short={}) for part, n in zip(parts, seen, strict=False)]
    mean = joint(*reports).statistics["v"]
    assert mean.dtype is dtype
    counted = [part for part, n in zip(parts, seen, strict=False) if 0 < n < math.inf] or parts[:1]
    assert min(map(float, counted)) <= float(mean) <= max(map(float, counted))
    assert float(mean) > 0


@given(dtype=DTYPES, value=st.floats(-1e4, 1e4), seen=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_equal_values_keep_their_bits(dtype: torch.dtype, value: float, seen: list[int]) -> None:
    part = torch.tensor([value, 1.0]).to(dtype)
    reports = [statistic(part.clone(), float(n), short={}) for n in seen]
    assert bits(joint(*reports).statistics["v"]) == bits(part)


def test_means_of_complex_statistics_and_of_other_shapes() -> None:
    whole = [torch.tensor([1 + 1j]), torch.tensor([3 - 1j]), torch.zeros(2, dtype=torch.complex64)]
    mean = joint(*(statistic(value, short={}) for value in whole)).statistics["v"]
    assert mean.tolist() == [2 + 0j]


def test_the_means_and_what_is_short_are_those_that_the_chief_has() -> None:
    other = UntrainedState({"mine": (1.0, torch.ones(1))}, {"long": b"1", "same": b"x", "only here": b"y"})
    chief = statistic(torch.zeros(1), digests={"long": b"0", "same": b"x"}, short={"a": 1})
    state = joint(other, chief)
    assert list(state.statistics) == ["v"]
    assert state.differing == {"long", "only here"}
    assert state.short == {"a": 1}
    assert joint(other, other).short is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.empty(0, 3),
        torch.tensor(True),
        torch.zeros(4)[::4],
    ],
    ids=["conjugated", "bfloat16", "float8", "empty", "flag", "single"],
)
def test_reports_can_be_sent(tensor: Tensor) -> None:
    def sent(value: Any) -> Any:
        header, buffers = codec.encode(value)
        return codec.decode(header, [bytearray(buffer) for buffer in buffers])

    report = UntrainedState({"v": (2.5, tensor)}, {"long": b"digest"}, {"plain": {"a": tensor}, "odd": b""})
    state = JointState({"v": tensor}, frozenset({"long"}), report.short)
    for value in (report, state):
        got = sent(value)
        assert type(got) is type(value)
        found = got.statistics["v"][1] if value is report else got.statistics["v"]
        for each in (found, got.short["plain"]["a"]):
            assert (each.shape, each.dtype) == (tensor.shape, tensor.dtype)
            assert bits(each.reshape(-1)) == b"".join(bits(value) for value in tensor.resolve_conj().reshape(-1))
        rest = {f.name for f in dataclasses.fields(value)} - {"statistics", "short"}
        assert all(getattr(got, name) == getattr(value, name) for name in rest)
