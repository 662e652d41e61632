"""Buffers and frozen parameters at sync points: all take the chief's, and joint running statistics."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_asgd.protocol import JointState, Policy, UntrainedState, codec
from lightning_asgd.protocol.reductions import reduce
from lightning_asgd.worker.collectives import Collectives
from lightning_asgd.worker.module_state import persistent_buffers
from lightning_asgd.worker.running_statistics import Interval, is_statistic
from lightning_asgd.worker.session_client import SessionClient
from lightning_asgd.worker.untrained_state import UntrainedTensors
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

    def __init__(
        self, dtype: torch.dtype = torch.float32, *, counts: bool = True, momentum: float | None = 1.0
    ) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=momentum, dtype=dtype)
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
        ([(1.0, 3), (5.0, 1)], 2.0),
        ([(1.0, 1), (5.0, 0)], 1.0),
        ([(1.0, 0), (5.0, 2)], 5.0),
        ([(1.0, 0), (5.0, 0)], 0.0),
        ([(1.0, 1), (2.0, 1), (6.0, 1)], 3.0),
        ([(torch.nan, 2), (4.0, 1)], 4.0),
        ([(4.0, 1), (torch.inf, 2)], 4.0),
    ],
)
def test_running_statistics_are_averaged_by_the_batches_seen(
    seen: list[tuple[float, int]], mean: float, counts: bool
) -> None:
    for found, counter in averaged(seen, counts=counts):
        assert found.tolist() == [mean, mean]
        assert counter == (seen[0][1] if counts else None)  # the chief's


def intervals(module: Normed, seen: list[tuple[float, int]], rank: int, collectives: Collectives) -> Any:
    """Train an interval of these means and batches by rank, twice, and return the joint mean and variance."""
    tensors = UntrainedTensors(module, set)
    for _ in range(2):
        tensors.begin_interval(0)
        module.see(*seen[rank])
        tensors.share(collectives, seen[rank][1])
    return module.norm.running_mean[0].item(), module.norm.running_var[0].item()


@pytest.mark.parametrize(
    ("momentum", "batches"), [(0.1, (60, 3)), (0.01, (2, 1)), (0.1, (1, 1)), (0.1, (0, 5)), (1.0, (4, 1))]
)
def test_they_become_those_of_one_layer_that_has_seen_the_batches_of_all(
    momentum: float, batches: tuple[int, int]
) -> None:
    # A slow worker's own still consist mostly of their first values: a mean of 0 and a variance of 1.
    seen = [(30.0, batches[0]), (20.0, batches[1])]
    found = together(2, lambda c, rank: intervals(Normed(torch.float64, momentum=momentum), seen, rank, c))
    mean, left = sum(m * n for m, n in seen) / sum(batches), (1 - momentum) ** (2 * sum(batches))
    assert found == [pytest.approx(((1 - left) * mean, left + (1 - left) * 2.0), rel=1e-9)] * 2


class Unseen(nn.Module):
    """A norm without a counter, as in several libraries, which sees four batches per step."""

    def __init__(self) -> None:
        super().__init__()
        self.momentum = 0.1
        self.register_buffer("running_mean", torch.zeros(1))


def test_without_a_count_of_batches_values_are_averaged_and_stay_between_those_of_the_workers() -> None:
    def work(collectives: Collectives, rank: int) -> list[float]:
        module, found = Unseen(), []
        tensors = UntrainedTensors(module, set)
        for turn in range(3):
            tensors.begin_interval(5 * turn)
            for _ in range(20):
                module.running_mean.lerp_(torch.tensor([10.0]), module.momentum)
            tensors.share(collectives, 5 * (turn + 1))
            found.append(module.running_mean.item())
        return found

    for found in together(4, work):
        assert found == [pytest.approx(10.0 * (1 - 0.9 ** (20 * turn))) for turn in (1, 2, 3)]


def test_a_layer_that_does_not_count_what_it_sees_is_weighted_by_steps() -> None:
    def work(collectives: Collectives, rank: int) -> float:
        module = nn.Sequential(nn.InstanceNorm1d(1, momentum=1.0, track_running_stats=True))
        tensors = UntrainedTensors(module, set)
        module(torch.tensor([[[-1.0, 1.0]]]) + (1.0, 5.0)[rank])
        tensors.share(collectives, (3, 1)[rank])
        return module[0].running_mean.item()

    assert together(2, work) == [2.0, 2.0]


@pytest.mark.parametrize("what", ["momentum", "reset", "removed", "NaN"])
def test_what_a_program_does_within_an_interval_keeps_the_mean_between_the_workers(what: str) -> None:
    def work(collectives: Collectives, rank: int) -> float:
        module = Normed(momentum=0.5)
        module.other = nn.BatchNorm1d(2)
        tensors = UntrainedTensors(module, set)
        module.see(10.0, 12)
        tensors.share(collectives, 0)
        if what == "NaN":
            module.norm.running_mean.fill_(torch.nan)
        tensors.begin_interval(0)
        if what == "reset":
            module.norm.reset_running_stats()
        if what == "NaN":
            module.norm.running_mean.fill_(0.0)
        module.see(10.0, 10)
        if what == "momentum":
            module.norm.momentum = 0.01
        if what == "removed":
            module.other = None
        tensors.share(collectives, 10)
        return module.norm.running_mean[0].item()

    assert together(4, work) == [pytest.approx(10.0, abs=0.02)] * 4


def test_what_a_program_computes_between_two_intervals_is_the_chiefs() -> None:
    # As torch.optim.swa_utils.update_bn() in a hook, after which the counter is larger by chance.
    def work(collectives: Collectives, rank: int) -> Any:
        module = Normed(momentum=0.1)
        tensors = UntrainedTensors(module, set)
        for mean, batches in [(1.0, 1), (30.0 + rank, 3)]:
            module.norm.reset_running_stats()
            module.see(mean, batches)
            mine = module.norm.running_mean.tolist()
            tensors.share(collectives, 0)
        return mine, module.norm.running_mean.tolist()

    (chiefs, first), (_, second) = together(2, work)
    assert first == second == chiefs


@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    momentum=st.floats(1e-3, 1.0),
    batches=st.integers(1, 200),
    variance=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
)
def test_what_batches_have_added_to_a_variance_is_their_own(
    dtype: torch.dtype, momentum: float, batches: int, variance: float
) -> None:
    module = nn.Sequential(nn.BatchNorm1d(64, momentum=momentum, dtype=dtype))
    interval = Interval(module, persistent_buffers(module), 0)
    norm, seen = module[0], torch.full((64,), variance, dtype=dtype)
    for _ in range(batches):
        norm.running_var.mul_(1 - momentum).add_(seen, alpha=momentum)
        norm.num_batches_tracked += 1
    count, added = interval.parts(persistent_buffers(module), 0)["0.running_var"]
    assert count == batches
    assert added.dtype is dtype
    assert (added >= 0).all()
    assert added.isfinite().all()
    if dtype in (torch.float32, torch.float64):
        assert added.tolist() == pytest.approx([variance] * 64, rel=1e-2, abs=1e-3)
    else:  # values that round much are averaged as they are
        assert torch.equal(added, norm.running_var)


def test_a_variance_that_a_program_has_set_counts_as_it_is() -> None:
    module = Normed(momentum=0.1)
    interval = Interval(module, persistent_buffers(module), 0)
    module.see(1.0, 1)
    module.norm.running_var.fill_(0.01)
    _, added = interval.parts(persistent_buffers(module), 1)["norm.running_var"]
    assert added.tolist() == pytest.approx([0.01, 0.01])


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
            tensors.begin_interval(0)
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

    assert together(2, work) == [[(2.0, 8), (3.0, 9), (4.0, 0)]] * 2


def test_a_counter_of_any_dtype_and_form_is_read() -> None:
    class Counters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, counter in (("a", torch.tensor(2)), ("b", torch.tensor([3.0])), ("c", torch.empty(0))):
                layer = nn.Module()
                layer.register_buffer("num_batches_tracked", counter)
                setattr(self, name, layer)

    module = Counters()
    for layer in (module.a, module.b, module.c):
        layer.register_buffer("running_mean", torch.zeros(1))
    interval = Interval(module, persistent_buffers(module), 0)
    with torch.no_grad():
        for layer in (module.a, module.b, module.c):
            layer.running_mean.add_(1)
            layer.num_batches_tracked.add_(4)
    parts = interval.parts(persistent_buffers(module), 9)
    assert {name: seen for name, (seen, _) in parts.items()} == {
        "a.running_mean": 4.0,
        "b.running_mean": 4.0,
        "c.running_mean": 9.0,  # it has no counter
    }


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
    seen=st.lists(st.integers(0, 1000), min_size=5, max_size=5),
)
def test_positive_variances_stay_positive_and_between_those_of_the_workers(
    dtype: torch.dtype, values: list[float], seen: list[int]
) -> None:
    parts = [torch.tensor([value]).to(dtype) for value in values]
    reports = [statistic(part, float(n), short={}) for part, n in zip(parts, seen, strict=False)]
    mean = joint(*reports).statistics["v"]
    assert mean.dtype is dtype
    counted = [part for part, n in zip(parts, seen, strict=False) if n] or parts[:1]
    assert min(map(float, counted)) <= float(mean) <= max(map(float, counted))
    assert float(mean) > 0


@given(dtype=DTYPES, value=st.floats(-1e4, 1e4), seen=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_equal_values_keep_their_bits(dtype: torch.dtype, value: float, seen: list[int]) -> None:
    part = torch.tensor([value, 1.0]).to(dtype)
    reports = [statistic(part.clone(), float(n), short={}) for n in seen]
    assert bits(joint(*reports).statistics["v"]) == bits(part)


@given(
    values=st.lists(st.floats(0, 1e30), min_size=1, max_size=5),
    seen=st.lists(st.sampled_from([0.0, 1.0, 7.0, 1e9, torch.inf, torch.nan, -3.0]), min_size=5, max_size=5),
    left=st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, torch.nan, torch.inf]),
    start=st.sampled_from([0.0, 1.0, 1e30, torch.nan, torch.inf]),
)
def test_no_report_makes_a_statistic_negative_or_nonfinite(
    values: list[float], seen: list[float], left: float, start: float
) -> None:
    starts = {"v": (left, torch.tensor([start]))}
    reports = [statistic(torch.tensor([v]), n, short={}, starts=starts) for v, n in zip(values, seen, strict=False)]
    mean = joint(*reports).statistics["v"]
    assert mean.isfinite().all()
    assert float(mean) >= 0


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

    short = {"plain": {"a": tensor}, "odd": b""}
    report = UntrainedState({"v": (2.5, tensor)}, {"long": b"digest"}, short, {"v": (0.9, torch.ones(2))})
    state = JointState({"v": tensor}, frozenset({"long"}), report.short)
    for value in (report, state):
        got = sent(value)
        assert type(got) is type(value)
        found = got.statistics["v"][1] if value is report else got.statistics["v"]
        for each in (found, got.short["plain"]["a"]):
            assert (each.shape, each.dtype) == (tensor.shape, tensor.dtype)
            assert bits(each.reshape(-1)) == b"".join(bits(value) for value in tensor.resolve_conj().reshape(-1))
        rest = {f.name for f in dataclasses.fields(value)} - {"statistics", "short", "starts"}
        assert all(getattr(got, name) == getattr(value, name) for name in rest)
