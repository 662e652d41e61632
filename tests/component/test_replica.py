from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.algorithms import ASGD, EASGD, Downpour
from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.layout import Layout, build_layout
from lightning_asgd.core.worker import replica_spans
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.replica_kinds import GradientReplica, replica_for
from tests.helpers.script import bits

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]

# Ways in which a module's tensor may lie in memory; each returns a tensor of the given values.
MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() else t.clone(),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t.clone(),
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
    "offset": lambda t: torch.cat([t.new_zeros(3), t.reshape(-1)])[3:].view(t.shape),
}
SHAPES = [(), (1,), (5,), (2, 3), (2, 3, 2, 2), (4, 1)]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 8).to(dtype)


@dataclass
class Case:
    layout: Layout
    tensors: list[torch.Tensor]
    replica: Replica

    def flat(self) -> list[tuple[torch.Tensor, ...]]:
        """The module's present values as the servers see them."""
        return pack_by_hand(self.layout, self.tensors)

    def answers(self, seed: int) -> list[tuple[torch.Tensor, ...]]:
        return pack_by_hand(self.layout, [values(t.shape, t.dtype, seed + i) for i, t in enumerate(self.tensors)])

    def train(self, seed: int) -> None:
        for index, t in enumerate(self.tensors):
            t.copy_(values(t.shape, t.dtype, seed + index))


def pack_by_hand(layout: Layout, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    groups = []
    for g in range(len(layout.groups)):
        members = [t for t, spec in zip(tensors, layout.tensors, strict=True) if spec.group == g]
        groups.append(torch.cat([t.contiguous().view(-1) for t in members]))
    return [
        tuple(group[slice(*layout.bounds(s, g))].clone() for g, group in enumerate(groups))
        for s in range(layout.num_servers)
    ]


def same(a: list[tuple[torch.Tensor, ...]], b: list[tuple[torch.Tensor, ...]]) -> bool:
    return [[bits(t) for t in server] for server in a] == [[bits(t) for t in server] for server in b]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kinds = st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(sorted(MEMORY)))
    chosen = draw(st.lists(kinds, min_size=1, max_size=8))
    tensors = [MEMORY[memory](values(shape, dtype, i)) for i, (shape, dtype, memory) in enumerate(chosen)]
    servers = draw(st.integers(1, min(4, sum(t.numel() for t in tensors))))
    layout = build_layout([(f"p{i}", t) for i, t in enumerate(tensors)], servers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_spans, "_CHUNK", draw(st.sampled_from([1, 2, 5, 1 << 18])))
        patch.setattr(replica_spans, "_SMALL", draw(st.sampled_from([0, 2, 1 << 14])))
        return Case(layout, tensors, Replica(layout, [(tensors, i) for i in range(len(tensors))], [None] * servers))


@given(cases())
def test_weights_are_the_modules_values_in_the_servers_order(case: Case) -> None:
    weights = case.replica.weights()
    assert same(weights, case.flat())
    case.train(50)
    assert not any(t.requires_grad for server in weights for t in server)


@given(cases())
def test_adopt_then_pack_sends_the_difference(case: Case) -> None:
    r = case.answers(100)
    case.replica.adopt(r)
    assert same(case.flat(), r)
    case.train(200)
    x = case.flat()
    case.replica.pack()
    assert same(case.flat(), x)  # packing does not touch the module
    for server in range(case.layout.num_servers):
        for g in range(len(case.layout.groups)):
            assert bits(case.replica.wire[server][g]) == bits(x[server][g] - r[server][g])


def after_a_push(held: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a server holds if it held ``held``, this worker went on from there to ``x``, and nobody else pushes."""
    return held + (x - held)


@given(cases())
def test_packing_again_sends_what_came_since_and_what_rounding_left_behind(case: Case) -> None:
    r = case.answers(100)
    case.replica.adopt(r)
    case.train(200)
    case.replica.pack()
    first = case.flat()
    case.train(300)
    second = case.flat()
    case.replica.pack()
    for server in range(case.layout.num_servers):
        for g in range(len(case.layout.groups)):
            held = after_a_push(r[server][g], first[server][g])
            assert bits(case.replica.wire[server][g]) == bits(second[server][g] - held)


@given(cases())
def test_merge_keeps_what_was_trained_since_the_push(case: Case) -> None:
    first = case.answers(100)
    case.replica.adopt(first)
    case.train(200)
    case.replica.pack()
    pushed = case.flat()
    case.train(300)
    x, r = case.flat(), case.answers(400)
    case.replica.merge(r)
    merged = case.flat()
    case.replica.pack()
    for server in range(case.layout.num_servers):
        for g in range(len(case.layout.groups)):
            held = after_a_push(first[server][g], pushed[server][g])
            assert bits(merged[server][g]) == bits(x[server][g] + (r[server][g] - held))
            # What is pushed next is measured from the servers' weights.
            assert bits(case.replica.wire[server][g]) == bits(merged[server][g] - r[server][g])


@given(cases(), st.booleans())
def test_what_is_ahead_is_what_merging_would_make_of_the_module(case: Case, alone: bool) -> None:
    case.replica.adopt(case.answers(100))
    case.train(200)
    case.replica.pack()
    case.train(300)
    x, r = case.flat(), case.answers(400)
    ahead = case.replica.ahead(r)
    assert same(case.flat(), x)
    case.replica.merge(r, pushed=False, alone=alone)
    assert same(pack_by_hand(case.layout, list(ahead.values())), case.flat())


@given(cases())
def test_adopt_forgets_what_was_trained(case: Case) -> None:
    case.replica.adopt(case.answers(100))
    case.train(200)
    r = case.answers(300)
    case.replica.adopt(r)
    assert same(case.flat(), r)
    case.replica.pack()
    assert not any(wire.any() for wire in case.replica.wire[0])


@given(cases())
def test_read_names_the_servers_weights_and_touches_nothing(case: Case) -> None:
    case.replica.adopt(case.answers(100))
    before, r = case.flat(), case.answers(300)
    named = case.replica.read(r)
    assert same(case.flat(), before)
    assert list(named) == [spec.name for spec in case.layout.tensors]
    assert same(pack_by_hand(case.layout, list(named.values())), r)
    for (_, read), tensor in zip(named.items(), case.tensors, strict=True):
        assert read.shape == tensor.shape
        assert read.dtype is tensor.dtype


@given(cases())
def test_the_distance_is_the_norm_of_all_parameters_minus_the_servers_and_touches_nothing(case: Case) -> None:
    answers, before = case.answers(seed=50), case.flat()
    parts = [
        torch.linalg.vector_norm(mine - theirs).double()
        for here, there in zip(before, answers, strict=True)
        for mine, theirs in zip(here, there, strict=True)
    ]
    expected = float(torch.linalg.vector_norm(torch.stack(parts)))
    assert case.replica.distance(answers) == pytest.approx(expected, rel=0.01)
    assert same(case.flat(), before)


@given(cases(), st.data(), st.booleans())
def test_what_a_program_changes_is_known_by_name(case: Case, data: st.DataObject, spoilt: bool) -> None:
    answers = case.answers(100)
    for shard in answers if spoilt else ():
        for group in shard:
            group[:1] = math.nan  # which differs from itself
    case.replica.adopt(answers)
    assert case.replica.changed() == []
    changed = data.draw(st.sets(st.integers(0, len(case.tensors) - 1)))
    for index in changed:
        last = (-1,) * case.tensors[index].dim()
        case.tensors[index][last] = 2.0 if case.tensors[index][last] == 1.0 else 1.0
    before = case.flat()
    assert sorted(case.replica.changed()) == sorted(f"p{index}" for index in changed)
    assert same(case.flat(), before)


@pytest.mark.parametrize("algorithm", [ASGD(), Downpour(), EASGD()], ids=lambda a: a.payload.value)
@pytest.mark.parametrize("park", [False, True])
def test_weights_of_its_own_that_a_worker_has_parked_are_no_change(algorithm: Algorithm, park: bool) -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    layout = build_layout([("a", tensors[0]), ("b", tensors[1])], 1)
    replica = replica_for(algorithm, layout, [(tensors, 0), (tensors, 1)], [None])
    replica.adopt([(torch.tensor([5.0, 6.0, 7.0]),)], park=park)
    assert replica.changed() == []
    tensors[1].fill_(9.0)
    assert replica.changed() == ["b"]
    replica.adopt([(torch.tensor([5.0, 6.0, 9.0]),)], park=park)
    assert replica.changed() == []


@given(cases())
def test_tensors_stay_where_they_are(case: Case) -> None:
    before = [(t.data_ptr(), t.stride()) for t in case.tensors]
    case.replica.adopt(case.answers(100))
    case.replica.pack()
    case.replica.merge(case.answers(200))
    assert [(t.data_ptr(), t.stride()) for t in case.tensors] == before


def channels_last_case() -> Case:
    tensor = values((2, 3, 2, 2), torch.float32, 0).contiguous(memory_format=torch.channels_last)
    layout = build_layout([("w", tensor)], 2)
    return Case(layout, [tensor], Replica(layout, [([tensor], 0)], [None, None]))


def test_a_channels_last_tensor_keeps_its_format_and_its_neighbours_order() -> None:
    case = channels_last_case()
    case.replica.adopt([(torch.arange(12.0),), (torch.arange(12.0, 24.0),)])
    assert case.tensors[0].is_contiguous(memory_format=torch.channels_last)
    assert case.tensors[0].contiguous().view(-1).tolist() == list(range(24))


def test_parameters_that_require_gradients_can_be_changed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    replica = Replica(build_layout([("w", parameter)], 1), [([parameter], 0)], [None])
    replica.adopt([(torch.ones(4),)])
    parameter.sum().backward()
    assert parameter.tolist() == [1.0] * 4


def test_updates_are_by_value_where_there_is_no_block() -> None:
    case = channels_last_case()
    assert case.replica.updates() == case.replica.wire


@pytest.mark.skipif(shared_memory.create([]) is None, reason="this system has no shared memory")
def test_updates_lie_in_the_block_where_there_is_one() -> None:
    tensor = torch.zeros(6)
    layout = build_layout([("w", tensor)], 2)
    blocks = [shared_memory.create(layout.shard(s)) for s in range(2)]
    replica = Replica(layout, [([tensor], 0)], blocks)
    replica.adopt([(torch.zeros(3),), (torch.zeros(3),)])
    tensor.copy_(torch.arange(6.0))
    replica.drop_block(1)
    replica.drop_block(1)
    replica.pack()
    assert blocks[0] is not None
    assert blocks[0].tensors[0].tolist() == [0.0, 1.0, 2.0]
    by_value = replica.updates()
    assert by_value[0] is None
    assert by_value[1] is not None
    assert by_value[1][0].tolist() == [3.0, 4.0, 5.0]
    blocks[0].tensors[0].fill_(7.0)  # the server's answer
    replica.merge([replica.wire[0], (torch.full((3,), 8.0),)])
    assert tensor.tolist() == [7.0] * 3 + [8.0] * 3
    replica.close()
    replica.close()
    assert replica.wire == []


@pytest.mark.skipif(shared_memory.create([]) is None, reason="this system has no shared memory")
@pytest.mark.parametrize("algorithm", [ASGD(), Downpour(), EASGD()], ids=lambda a: a.payload.value)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e20])
@pytest.mark.parametrize("place", [0, 299_999, 599_999])
def test_a_worker_sees_what_is_not_sane_of_an_update_in_shared_memory(
    algorithm: Algorithm, bad: float, place: int
) -> None:
    tensor = torch.zeros(600_000)
    tensor.grad = gradient = torch.ones(600_000)
    layout = build_layout([("w", tensor)], 2)
    blocks = [shared_memory.create(layout.shard(s)) for s in range(2)]
    replica = replica_for(algorithm, layout, [([tensor], 0)], blocks)
    replica.adopt([tuple(torch.zeros_like(t) for t in shard) for shard in replica.wire])
    for value, is_within_bounds in ((1.0, True), (bad, False)):
        tensor[place] = gradient[place] = value
        replica.accrue()
        replica.pack()
        assert replica.within_bounds is is_within_bounds
    replica.close()


def test_a_replica_of_gradients_remembers_what_it_fetched_where_memory_is_not_shared() -> None:
    weight = torch.zeros(3)
    weight.grad = torch.ones(3)
    layout = build_layout([("w", weight)], 1)
    blocks = [shared_memory.create(layout.shard(0))]
    replica = GradientReplica(layout, [([weight], 0)], blocks, remembers=True)
    replica.drop_block(0)  # the server is on another machine
    replica.adopt([(torch.tensor([1.0, 2.0, 3.0]),)])
    weight -= 5.0
    replica.accrue()
    replica.pack()
    assert replica.fetched(0)[0].tolist() == [1.0, 2.0, 3.0]
    replica.pack_again(0)
    assert replica.wire[0][0].tolist() == [1.0, 1.0, 1.0]
