from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_asgd.algorithms import ASGD, Algorithm, Barrier, DelayCompensation, DiLoCo, Downpour, GapAware, SoftSync
from lightning_asgd.core.foundation.errors import ProtocolError, WorkerLostError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Exchange, Reply
from lightning_asgd.core.server import group_rules
from lightning_asgd.core.server.shard import REFUSED_IN_A_ROW, Shard
from lightning_asgd.core.server.update_buffers import Buffers
from lightning_asgd.recovery.shard_copy import copied
from tests.helpers.script import bits

GROUPS = (
    (Role.PARAMETER, "float32", 7),
    (Role.PARAMETER, "bfloat16", 3),
    (Role.PARAMETER, "float64", 2),
    (Role.PARAMETER, "complex64", 2),
)
Tensors = tuple[torch.Tensor, ...]


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(n, generator=generator, dtype=torch.float64) * 10 for _, _, n in GROUPS]
    return tuple(v.to(getattr(torch, dtype)) for v, (_, dtype, _) in zip(values, GROUPS, strict=True))


def new_shard(scale: str | float = "mean", version: int = 0) -> Shard:
    shard = Shard(GROUPS, ASGD(scale))
    shard.initialise(tensors(0), version)
    return shard


def message(worker: int = 0, seq: int = 1, base_version: int = 0, push: bool = True, fetch: bool = True) -> Exchange:
    return Exchange("s", worker, seq, base_version, push, fetch)


def exchange(shard: Shard, asked: Exchange, buffer: Tensors | None, live: int) -> Reply:
    """An exchange whose answer is due at once."""
    assert shard.update_members(range(live)) == []
    (due,) = shard.exchange(asked, buffer)
    assert due.request is asked
    return due.reply


def by_value(shard: Shard, update: Tensors | None, live: int = 2, **fields: Any) -> tuple[Reply, Tensors | None]:
    """Push as a wire would: the shard gets tensors of its own."""
    update = None if update is None else tuple(t.clone() for t in update)
    reply = exchange(shard, message(push=update is not None, **fields), update, live)
    return reply, reply.weights


def shared(shard: Shard, update: Tensors | None, live: int = 2, **fields: Any) -> tuple[Reply, Tensors]:
    """Push through a block that holds the update on entry and the weights on return."""
    block = tuple(torch.zeros_like(t) for t in tensors(0)) if update is None else tuple(t.clone() for t in update)
    asked = replace(message(push=update is not None, **fields), shared=True)
    return exchange(shard, asked, block, live), block


def same(a: Tensors | None, b: Tensors | None) -> bool:
    assert a is not None
    assert b is not None
    return [bits(t) for t in a] == [bits(t) for t in b]


def copies(shard: Shard) -> Tensors:
    assert shard.weights is not None
    return tuple(t.clone() for t in shard.weights)


@pytest.mark.parametrize("path", [by_value, shared])
def test_a_push_moves_every_group(path: Any) -> None:
    shard = new_shard("sum")
    old, update = copies(shard), tensors(1)
    reply, answer = path(shard, update, live=4)
    assert reply.verdict is Verdict.APPLIED
    assert all(map(torch.equal, answer, map(torch.add, old, update)))
    assert same(shard.weights, answer)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["by value", "shared"]), st.booleans(), st.booleans(), st.integers(1, 5)),
        max_size=8,
    ),
    scale=st.sampled_from(["mean", "sum", 0.3]),
)
def test_both_paths_give_the_same_bits_in_any_mixture(
    steps: list[tuple[str, bool, bool, int]], scale: str | float
) -> None:
    mixed, reference = new_shard(scale), new_shard(scale)
    for seq, (path, push, fetch, live) in enumerate(steps, start=1):
        update = tensors(seq) if push else None
        expected, weights = by_value(reference, update, live, seq=seq, fetch=fetch)
        if path == "shared":
            reply, block = shared(mixed, update, live, seq=seq, fetch=fetch)
            assert reply.weights is None
            assert not fetch or same(block, weights)
        else:
            reply, answer = by_value(mixed, update, live, seq=seq, fetch=fetch)
            assert (answer is None) == (not fetch)
            assert not fetch or same(answer, weights)
        assert (reply.version, reply.staleness, reply.verdict) == (
            expected.version,
            expected.staleness,
            expected.verdict,
        )
        assert same(mixed.weights, reference.weights)


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (1 << 18, 2, 1):
        monkeypatch.setattr(group_rules, "CHUNK", chunk)
        shard = new_shard(0.5)
        _, block = shared(shard, tensors(1))
        _, answer = by_value(shard, tensors(2), seq=2)
        results.append((block, answer))
    assert all(same(block, results[0][0]) for block, _ in results)
    assert all(same(answer, results[0][1]) for _, answer in results)


@given(paths=st.lists(st.sampled_from(["by value", "shared"]), min_size=1, max_size=6), how=st.booleans())
def test_an_earlier_answer_never_changes(paths: list[str], how: bool) -> None:
    shard = new_shard()
    kept = []
    for seq, path in enumerate(paths, start=1):
        _, answer = by_value(shard, tensors(100 + seq) if how else None, worker=1, seq=seq)
        assert answer is not None
        kept.append((answer, tuple(t.clone() for t in answer)))
        (shared if path == "shared" else by_value)(shard, tensors(seq), seq=seq)
    assert all(same(answer, copy) for answer, copy in kept)


@pytest.mark.parametrize("path", [by_value, shared])
def test_a_push_delivered_again_changes_nothing(path: Any) -> None:
    shard = new_shard()
    first, _ = path(shard, tensors(1), seq=1)
    weights = copies(shard)
    again, answer_again = path(shard, tensors(1), seq=1)
    assert (first.verdict, again.verdict) == (Verdict.APPLIED, Verdict.REPEATED)
    assert first.version == again.version == shard.version == 1
    assert same(answer_again, weights)
    assert same(shard.weights, weights)
    assert (shard.counts.applied, shard.counts.repeated) == (1, 1)


def test_a_late_repetition_is_told_from_a_new_push() -> None:
    shard = new_shard()
    for seq in (1, 2, 3):
        by_value(shard, tensors(seq), seq=seq)
    weights = copies(shard)
    assert by_value(shard, tensors(1), seq=1)[0].verdict is Verdict.REPEATED
    assert same(shard.weights, weights)
    assert by_value(shard, tensors(1), seq=4)[0].verdict is Verdict.APPLIED


def test_workers_count_their_pushes_separately() -> None:
    shard = new_shard()
    assert by_value(shard, tensors(1), worker=0, seq=5)[0].verdict is Verdict.APPLIED
    assert by_value(shard, tensors(1), worker=1, seq=5)[0].verdict is Verdict.APPLIED
    assert shard.version == 2


@pytest.mark.parametrize("path", [by_value, shared])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_an_update_that_is_not_finite_is_refused_whole(path: Any, bad: float, group: int) -> None:
    shard = new_shard("sum")
    before = copies(shard)
    update = tensors(1)
    update[group][-1] = bad
    reply, answer = path(shard, update)
    assert reply.verdict is Verdict.REFUSED
    assert reply.version == shard.version == 0
    assert same(shard.weights, before)
    assert same(answer, before)
    assert (shard.counts.applied, shard.counts.refused) == (0, 1)


@pytest.mark.parametrize("size", [1e14, 1e38])
def test_an_absurdly_large_update_is_refused(size: float) -> None:
    shard = new_shard("sum")
    before = copies(shard)
    update = tensors(1)
    update[0][0] = -size
    assert by_value(shard, update)[0].verdict is Verdict.REFUSED
    assert same(shard.weights, before)


def test_a_workers_word_for_an_update_counts_where_memory_is_shared_only() -> None:
    """There it could change the update after any look, and the look would be another pass over memory."""
    for shared_too, verdict in ((False, Verdict.REFUSED), (True, Verdict.APPLIED)):
        update = tensors(1)
        update[0][0] = math.nan
        asked = replace(message(), within_bounds=True, shared=shared_too)
        assert exchange(new_shard("sum"), asked, update, 2).verdict is verdict


def test_what_is_large_depends_on_the_weights() -> None:
    shard = new_shard("sum")
    assert shard.weights is not None
    shard.weights[0].fill_(100.0)
    update = tensors(1)
    update[0][0] = 1e11
    assert by_value(shard, update)[0].verdict is Verdict.APPLIED


@pytest.mark.parametrize("size", [6e4, 1e10, 3e38])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_weights_stay_finite_whatever_is_pushed(dtype: torch.dtype, size: float) -> None:
    """Updates that are finite add up, and weights that have grown let larger ones in."""
    shard = Shard(((Role.PARAMETER, str(dtype).removeprefix("torch."), 3),), ASGD("sum"))
    shard.initialise((torch.ones(3, dtype=dtype),), 0)
    for seq in range(1, 60):
        update = torch.full((3,), size * 10.0 ** min(seq, 30), dtype=torch.float64)
        update = update.clamp(max=torch.finfo(dtype).max).to(dtype)
        shard.exchange(Exchange("s", 0, seq, 0, True, True), (update,))
        shard.latest_push.clear()
        shard._refused.clear()
    assert torch.isfinite(shard.weights[0]).all()


def test_a_worker_that_sends_only_what_is_refused_is_stopped_by_name() -> None:
    shard = new_shard()

    def push(worker: int, seq: int, bad: bool) -> Verdict:
        update = tensors(seq)
        if bad:
            update[0][0] = math.nan
        return by_value(shard, update, worker=worker, seq=seq)[0].verdict

    for seq in range(1, REFUSED_IN_A_ROW):
        assert push(1, seq, True) is Verdict.REFUSED
        assert push(0, seq, seq % 2 == 0) is (Verdict.REFUSED if seq % 2 == 0 else Verdict.APPLIED)
    with pytest.raises(WorkerLostError, match=r"Worker 1 was stopped: its last 20 updates held NaN"):
        push(1, REFUSED_IN_A_ROW, True)
    assert push(0, REFUSED_IN_A_ROW, False) is Verdict.APPLIED


@pytest.mark.parametrize("path", [by_value, shared])
def test_a_refused_push_delivered_again_is_still_not_applied(path: Any) -> None:
    shard = new_shard()
    before = copies(shard)
    update = tensors(1)
    update[0][0] = math.nan
    path(shard, update)
    assert path(shard, update)[0].verdict is not Verdict.APPLIED
    assert same(shard.weights, before)
    assert path(shard, tensors(2), seq=2)[0].verdict is Verdict.APPLIED


def test_staleness_is_what_was_applied_since_the_fetch() -> None:
    shard = new_shard(version=10)
    assert by_value(shard, tensors(1), worker=0, seq=1, base_version=10)[0].staleness == 0
    assert by_value(shard, tensors(1), worker=1, seq=1, base_version=10)[0].staleness == 1
    assert by_value(shard, tensors(1), worker=2, seq=1, base_version=10)[0].staleness == 2
    assert by_value(shard, tensors(1), worker=0, seq=2, base_version=11)[0].staleness == 2
    assert by_value(shard, None, worker=0, seq=2, base_version=0)[0].staleness == 0
    assert shard.version == 14


def test_a_fetch_alone_changes_nothing() -> None:
    shard = new_shard(version=3)
    before = copies(shard)
    for path in (by_value, shared):
        reply, answer = path(shard, None)
        assert (reply.version, reply.verdict) == (3, Verdict.NONE)
        assert same(answer, before)
    assert shard.counts.fetched == 2


def test_a_push_alone_brings_no_weights() -> None:
    shard = new_shard()
    assert by_value(shard, tensors(1), seq=1, fetch=False)[1] is None
    reply, block = shared(shard, tensors(2), seq=2, fetch=False)
    assert reply.weights is None
    assert same(block, tensors(2))
    assert shard.counts.fetched == 0


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        tensors(1)[:3],
        (*tensors(1), torch.zeros(1)),
        (torch.zeros(6), *tensors(1)[1:]),
        (torch.zeros(7, dtype=torch.float64), *tensors(1)[1:]),
    ],
)
def test_an_update_of_the_wrong_shape_is_refused_with_both_shapes(wrong: Tensors) -> None:
    """Before it reaches the shard. In shared memory it has the shape that was checked when the worker joined."""
    push = replace(message(), update=wrong)
    with pytest.raises(
        ProtocolError, match=r"A shard was sent tensors of .* Expected \(\('float32', 7\), .*same module"
    ):
        Buffers().update(push, GROUPS, lasting=False)


def test_weights_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ProtocolError, match="A shard was sent tensors of"):
        Shard(GROUPS, ASGD()).initialise(tensors(0)[:1], 0)


def test_a_push_without_an_update_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Worker 0 pushed nothing"):
        new_shard().exchange(message(), None)


def test_a_shard_without_weights_says_so() -> None:
    shard = Shard(GROUPS, ASGD())
    assert not shard.initialised
    with pytest.raises(ProtocolError, match=r"Worker 0 exchanged before the shard had weights. Expected worker 0"):
        by_value(shard, tensors(1))


def test_a_resumed_shard_counts_on() -> None:
    shard = new_shard(version=41)
    assert by_value(shard, tensors(1), base_version=41)[0].version == 42


@pytest.mark.parametrize(
    "algorithm",
    [ASGD(transforms=[GapAware()]), Downpour("sgd", lr=0.1, transforms=[DelayCompensation(adaptive=True)])],
    ids=["GapAware", "DelayCompensation"],
)
def test_transforms_take_complex_weights_as_pairs_of_real_numbers(algorithm: Algorithm) -> None:
    generator = torch.Generator().manual_seed(1)
    pushes = [torch.randn(8, generator=generator) for _ in range(5)]
    found = []
    for dtype, form in (
        ("float32", torch.clone),
        ("complex64", lambda x: torch.view_as_complex(x.view(4, 2).clone())),
    ):
        shard = Shard(((Role.PARAMETER, dtype, 4 if dtype == "complex64" else 8),), algorithm)
        shard.initialise((form(torch.ones(8)),), 0)
        answer: Tensors | None = None
        for seq, update in enumerate(pushes, 1):
            _, answer = by_value(shard, (form(update),), worker=seq % 2, seq=seq, base_version=max(0, seq - 2))
        assert answer is not None
        found.append(torch.view_as_real(answer[0]).flatten() if answer[0].is_complex() else answer[0])
    torch.testing.assert_close(found[0], found[1])
    assert not torch.equal(found[0], torch.ones(8))


def test_a_shard_may_hold_nothing_of_a_group() -> None:
    shard = Shard(((Role.PARAMETER, "float32", 2), (Role.PARAMETER, "float64", 0)), ASGD("sum"))
    shard.initialise((torch.zeros(2), torch.zeros(0, dtype=torch.float64)), 0)
    _, answer = by_value(shard, (torch.ones(2), torch.zeros(0, dtype=torch.float64)))
    assert answer is not None
    assert [t.tolist() for t in answer] == [[1.0, 1.0], []]


@pytest.mark.parametrize("same_set", [True, False])
def test_a_restored_shard_does_not_count_who_has_left_meanwhile(same_set: bool) -> None:
    living = {0, 1, 2}
    shard = Shard(GROUPS, ASGD("mean"))
    shard.update_members(living, living)
    shard.resume(tensors(0), 0, {})
    living.remove(2)  # the membership's own set: a worker's report names who has left
    shard.resume(tensors(0), 0, {})
    shard.update_members(living if same_set else set(living), {2})
    shard.exchange(message(), tensors(1))
    expected = new_shard()
    exchange(expected, message(), tensors(1), live=2)
    assert all(map(torch.equal, shard.weights, expected.weights))


def test_a_batch_size_that_no_step_has_is_ignored() -> None:
    shard = new_shard()
    reply = exchange(shard, replace(message(), batch=1e300), tensors(1), live=2)
    assert reply.verdict is Verdict.APPLIED
    assert not shard.table.batches


# ---------------------------------------------------------------------- rounds of an elastic run


def in_rounds(*living: int) -> Shard:
    shard = Shard(GROUPS, ASGD(transforms=[Barrier()]), comes_and_goes=True)
    shard.initialise(tensors(0), 0)
    shard.update_members(living)
    for worker in living:  # they take the weights and begin to train
        (due,) = shard.exchange(replace(message(worker, push=False), full=True), None)
        assert due.reply.version == 0
    return shard


def pushed(shard: Shard, worker: int, seq: int = 1, **fields: Any) -> dict[int, Reply]:
    asked = replace(message(worker, seq), may_wait=True, **fields)
    return {due.request.worker: due.reply for due in shard.exchange(asked, tensors(worker))}


def test_a_round_waits_for_who_has_begun_to_train_and_not_for_who_joins() -> None:
    shard = in_rounds(1, 2)
    shard.update_members([1, 2, 3])
    assert pushed(shard, 1) == {}
    assert {worker: reply.pushes for worker, reply in pushed(shard, 2).items()} == {
        each: {1: 1, 2: 1} for each in (1, 2)
    }
    assert shard.version == 1
    assert pushed(shard, 3) == {}  # from its first push on it takes part
    assert pushed(shard, 2, 2) == {}
    assert pushed(shard, 1, 2).keys() == {1, 2, 3}


def test_who_joins_within_a_round_gets_what_has_been_pushed() -> None:
    shard = in_rounds(1, 2)
    assert pushed(shard, 1) == {}
    shard.update_members([1, 2, 3])
    due = shard.exchange(replace(message(3, push=False), full=True), None)
    assert {each.request.worker: (each.reply.version, each.reply.pushes) for each in due} == {
        1: (1, {1: 1}),
        3: (1, {1: 1}),
    }


def test_the_end_of_an_interval_holds_the_last_pushes_although_another_worker_trains() -> None:
    shard = in_rounds(1, 2)
    assert pushed(shard, 1, rest=True).keys() == {1}  # it has pushed its last steps
    assert shard.version == 0
    (due,) = shard.exchange(replace(message(1, push=False), full=True), None)
    assert (due.reply.version, due.reply.pushes) == (1, {1: 1})


def test_an_answer_names_only_pushes_that_its_weights_hold() -> None:
    shard = in_rounds(1, 2)
    pushed(shard, 1)
    pushed(shard, 2)
    assert pushed(shard, 1, 2) == {}
    (due,) = shard.exchange(message(2, 1, push=False), None)  # such as for a checkpoint
    assert (due.reply.version, due.reply.pushes) == (1, {1: 1, 2: 1})


def test_a_shard_that_is_restored_forgets_what_was_aggregated() -> None:
    shard = in_rounds(1, 2)
    pushed(shard, 1)
    shard.resume(tensors(0), 5, {1: 0, 2: 0})
    assert pushed(shard, 1) == {}
    shard.update_members([1])
    alone = in_rounds(1)
    pushed(alone, 1)
    assert all(map(torch.equal, shard.weights[:2], alone.weights[:2]))


# ---------------------------------------------------------------------- weights of 16 bits


def test_weights_that_are_set_replace_those_of_a_shard_and_what_was_aggregated_is_dropped() -> None:
    def shard_of(weights: Tensors, version: int) -> Shard:
        shard = Shard(GROUPS, ASGD("sum", transforms=[SoftSync()]))
        shard.initialise(weights, version)
        shard.update_members(range(3))
        return shard

    shard, expected = shard_of(tensors(0), 4), shard_of(tensors(2), 5)
    shard.exchange(message(worker=0), tensors(1))
    assert shard.table.count == 1
    shard.replace(tensors(2))
    assert same(shard.weights, tensors(2))
    assert (shard.version, shard.table.count) == (5, 0)
    for each in (shard, expected):
        for worker in (1, 2, 0):
            each.exchange(message(worker=worker, seq=2, base_version=5), tensors(3 + worker))
    assert same(shard.weights, copies(expected))
    assert shard.version == 6


def test_a_push_from_before_is_known_after_weights_were_set() -> None:
    shard = new_shard()
    by_value(shard, tensors(1))
    shard.replace(tensors(2))
    assert by_value(shard, tensors(1))[0].verdict is Verdict.REPEATED
    assert same(shard.weights, tensors(2))


def test_weights_that_are_set_must_have_the_form_of_the_shard() -> None:
    shard = new_shard()
    with pytest.raises(ProtocolError, match="A shard was sent tensors of"):
        shard.replace(tensors(2)[:1])
    assert same(shard.weights, tensors(0))


NARROW = ((Role.PARAMETER, "bfloat16", 2),)
ULP = 2.0**-7  # of 1 in bfloat16


def narrow(algorithm: Algorithm) -> Shard:
    shard = Shard(NARROW, algorithm)
    shard.initialise((torch.ones(2, dtype=torch.bfloat16),), 0)
    return shard


def small_pushes(shard: Shard, number: int, size: float = ULP, first: int = 0) -> list[float]:
    """Pushes of four workers in turn; returns the weights."""
    update = torch.full((2,), size, dtype=torch.bfloat16)
    for turn in range(first, first + number):
        by_value(shard, (update,), live=4, worker=turn % 4, seq=turn // 4 + 1)
    return shard.weights[0].tolist()


@pytest.mark.parametrize(
    ("algorithm", "sign"),
    [(ASGD(), 1), (Downpour("sgd", lr=1.0), -1), (ASGD(transforms=[SoftSync(4)]), 1), (ASGD(1 / 16), 4)],
    ids=str,
)
def test_small_updates_of_16_bit_weights_add_up(algorithm: Algorithm, sign: int) -> None:
    shard = narrow(algorithm)
    assert small_pushes(shard, 2, sign * ULP) == [1.0, 1.0]  # half a unit of rounding, to the even number
    assert small_pushes(shard, 14, sign * ULP, 2) == [1 + 4 * ULP] * 2
    assert shard.weights[0].dtype is torch.bfloat16


def test_a_momentum_of_16_bit_weights_has_32() -> None:
    shard = narrow(DiLoCo(momentum=0.999, lr=1e-6))
    for seq in range(1, 4):
        update = (torch.ones(2, dtype=torch.bfloat16),)
        exchange(shard, replace(message(seq=seq), rest=True), update, live=1)
    (kept,) = (slots["momentum"] for (slots,) in (each["slots"] for each in shard.state()))
    torch.testing.assert_close(kept, torch.full((2,), 1 + 0.999 + 0.999**2))


def test_a_snapshot_holds_what_rounding_removes_from_the_weights() -> None:
    shard = narrow(ASGD())
    small_pushes(shard, 2)
    kept, copy = copied(shard)
    small_pushes(shard, 1, first=2)
    copy.finish()
    again = Shard.restore_from_snapshot(kept)
    assert again.weights[0].tolist() == [1.0, 1.0]
    assert small_pushes(again, 1, first=2) == [1 + ULP] * 2


def test_a_snapshot_of_an_earlier_version_kept_everything_in_16_bits() -> None:
    shard = narrow(Downpour("adam", lr=1.0, transforms=[SoftSync(2)]))
    small_pushes(shard, 3)
    kept, copy = copied(shard)
    copy.finish()
    del kept["state"][0]["exact"]
    kept["pending"] = [each.bfloat16() for each in kept["pending"]]
    for each in kept["state"][0]["slots"]["optimizer"]["state"].values():
        each.update({name: each[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")})
    again = Shard.restore_from_snapshot(kept)
    again.update_members(range(4))
    torch.testing.assert_close(*(small_pushes(each, 1, first=3) for each in (again, shard)), rtol=0.01, atol=0)


@pytest.mark.parametrize("how", ["restored", "set"])
def test_weights_that_replace_a_shards_count_whole(how: str) -> None:
    shard, weights = narrow(ASGD()), (torch.full((2,), 3.0, dtype=torch.bfloat16),)
    small_pushes(shard, 2)
    if how == "restored":
        shard.resume(weights, 5, {})
    else:
        shard.replace(weights)
        shard.latest_push.clear()
    assert small_pushes(shard, 1) == [3.0, 3.0]
    assert small_pushes(shard, 7, first=1) == [3 + 2 * ULP] * 2
