"""One battery over all algorithms, and each one's own invariant; over the messages that workers send."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_asgd import Advanced, algorithms
from lightning_asgd.algorithms import (
    ASGD,
    EASGD,
    Algorithm,
    Barrier,
    DANASlim,
    DelayCompensation,
    DelayedNesterov,
    DiLoCo,
    Downpour,
    DropStale,
    DynamicSteps,
    GapAware,
    LayerWise,
    LocalSGD,
    Rennala,
    ScaleByStaleness,
    SoftSync,
    StaleSynchronous,
    StreamingDiLoCo,
    Transform,
    WarmStart,
    find,
)
from lightning_asgd.core.algorithms.base import Run
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.layout import Role, build_layout
from lightning_asgd.core.foundation.stats import Verdict
from lightning_asgd.core.protocol import Exchange, Reply
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.synchronizer import run
from tests.helpers.algorithms import EVERY, ON_SERVERS
from tests.helpers.cluster import Cluster
from tests.helpers.script import bits

N = 6
GROUPS = ((Role.PARAMETER, "float32", N), (Role.PARAMETER, "float64", 2))


def values(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, generator=generator), torch.randn(2, generator=generator, dtype=torch.float64)


def shard(algorithm: Algorithm, workers: int = 2, version: int = 0) -> Shard:
    result = Shard(GROUPS, algorithm)
    result.initialise(values(0), version)
    result.update_members(range(workers))
    return result


def push(worker: int, seq: int, base: int = 0, **more: Any) -> Exchange:
    defaults: dict[str, Any] = {"steps": 1, "lr": 0.1, "may_wait": True, "nsync": 1}
    return Exchange("s", worker, seq, base, True, True, **{**defaults, **more})


def send(to: Shard, message: Exchange, update: Sequence[Tensor] | None = None) -> list[Completion]:
    return to.exchange(message, tuple(t.clone() for t in update if t is not None) if update is not None else None)


def only(due: list[Completion]) -> Reply:
    (answer,) = due
    return answer.reply


def state(of: Shard) -> list[bytes]:
    assert of.weights is not None
    return [bits(t) for t in of.weights]


# ---------------------------------------------------------------------- the battery


@pytest.mark.parametrize("algorithm", ON_SERVERS.values(), ids=ON_SERVERS)
def test_the_same_messages_in_the_same_order_give_the_same_bits(algorithm: Algorithm) -> None:
    results = []
    for shared in (False, True, False):
        random = Random(1)
        one, answers, seqs, held = shard(algorithm, 3), [], [0, 0, 0], set[int]()
        for turn in range(20):
            worker = random.choice([w for w in range(3) if w not in held])
            seqs[worker] += 1
            due = send(one, push(worker, seqs[worker], max(0, one.version - turn % 3), shared=shared), values(turn))
            held = (held | {worker}) - {d.request.worker for d in due}
            answers.append([(d.request.worker, d.reply.version, d.reply.staleness, d.reply.verdict) for d in due])
            if len(held) == 3:
                break
        results.append((answers, state(one)))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("algorithm", ON_SERVERS.values(), ids=ON_SERVERS)
def test_a_repeated_message_changes_nothing(algorithm: Algorithm) -> None:
    one = shard(algorithm, 1)
    for seq in (1, 2, 3):
        send(one, push(0, seq, one.version), values(seq))
    before, version, table = state(one), one.version, one.table.count
    for seq in (1, 3, 2):
        (due,) = send(one, push(0, seq, version), values(seq))
        assert due.reply.verdict is Verdict.REPEATED
    assert (state(one), one.version, one.table.count) == (before, version, table)


@pytest.mark.parametrize("algorithm", ON_SERVERS.values(), ids=ON_SERVERS)
def test_chunks_make_no_difference(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (1 << 18, 4, 1):
        monkeypatch.setattr("lightning_asgd.core.server.group_rules.CHUNK", chunk)
        one = shard(algorithm, 1)
        answers = [only(send(one, push(0, seq, one.version), values(seq))).weights for seq in range(1, 7)]
        assert all(a is not None for a in answers)
        results.append([[bits(t) for t in a] for a in answers if a is not None])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("algorithm", ON_SERVERS.values(), ids=ON_SERVERS)
def test_a_push_that_is_not_finite_is_refused_and_the_worker_gets_the_old_weights(algorithm: Algorithm) -> None:
    one = shard(algorithm, 1)
    before = state(one)
    reply = only(send(one, push(0, 1), (torch.full((N,), math.nan), torch.zeros(2, dtype=torch.float64))))
    assert reply.verdict is Verdict.REFUSED
    assert state(one) == before
    assert only(send(one, replace(push(0, 1), push=False))).version == 0


@pytest.mark.parametrize("algorithm", ON_SERVERS.values(), ids=ON_SERVERS)
def test_a_shard_goes_on_from_what_it_saved(algorithm: Algorithm) -> None:
    one = shard(algorithm, 1)
    for seq in range(1, 5):
        send(one, push(0, seq, one.version), values(seq))
    if one.table.count:  # gathered pushes are not part of a checkpoint: at a sync point there are none
        send(one, replace(push(0, 9), push=False, may_wait=False, rest=True))
    assert one.weights is not None
    buffer = io.BytesIO()
    torch.save(one.state(), buffer)
    buffer.seek(0)
    other = Shard(GROUPS, algorithm)
    other.initialise(tuple(w.clone() for w in one.weights), one.version)
    other.update_members(range(1))
    other.restore(torch.load(buffer, weights_only=True))
    for seq in range(10, 15):
        for each in (one, other):
            send(each, push(0, seq, each.version), values(seq))
    assert state(one) == state(other)


@pytest.mark.parametrize("algorithm", ON_SERVERS.values(), ids=ON_SERVERS)
def test_nobody_is_held_at_a_sync_point_or_after_the_others_are_gone(algorithm: Algorithm) -> None:
    one = shard(algorithm, 3)
    waiting = {0, 1}
    for worker in (0, 1):
        waiting -= {d.request.worker for d in send(one, push(worker, 1), values(worker))}
    assert {d.request.worker for d in send(one, push(2, 1, may_wait=False, rest=True), values(3))} >= {2}
    waiting -= {d.request.worker for d in one.update_members([0, 2])}
    due = send(one, replace(push(0, 2), push=False, may_wait=False, rest=True))
    assert {d.request.worker for d in due} >= {0}
    assert one.table.count == 0  # what was gathered is applied once all rest


LONGER = {"downpour_adam": 300}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", sorted(ON_SERVERS))
def test_a_worker_alone_trains(name: str, shared: bool) -> None:
    w, rule = torch.zeros(4, requires_grad=True), ON_SERVERS[name]
    overlap = rule.waits and not rule.lockstep
    exchanger = Cluster(2).enter(
        0, {"w": w}, nsync=1, algorithm=rule, shared=shared, advanced=Advanced(overlap=overlap), lr=lambda: 0.2
    )
    optimizer = torch.optim.SGD([w], lr=0.2)
    run(exchanger.begin())
    for _ in range(LONGER.get(name, 60)):
        optimizer.zero_grad()
        ((w - 1) ** 2).sum().backward()
        optimizer.step()
        exchanger.count_step()
        run(exchanger.advance())
    run(exchanger.flush())
    run(exchanger.fetch(park=True))
    far = {"downpour_adadelta": 4.0, "downpour_adagrad": 0.1, "downpour_adam": 0.1, "ringmaster": 0.01}
    assert float(((w.detach() - 1) ** 2).sum()) < far.get(name, 1e-3)
    exchanger.close()


# ---------------------------------------------------------------------- N = 1 is the sequential method


def gradients(count: int) -> list[Tensor]:
    return [values(100 + k)[0] for k in range(count)]


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": ({"lr": 0.1, "options": {"momentum": 0.9}}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adagrad": ({"lr": 0.1}, lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-6)),
    "adadelta": ({}, lambda p: torch.optim.Adadelta(p, lr=1.0)),
    "adam": ({"lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01)),
    "torch.optim.RMSprop": ({"lr": 0.01}, lambda p: torch.optim.RMSprop(p, lr=0.01)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_downpour_with_one_worker_has_the_bits_of_its_optimizer(name: str) -> None:
    settings, make = OPTIMIZERS[name]
    one = shard(Downpour(name, **settings), 1)
    w = torch.nn.Parameter(values(0)[0])
    optimizer = make([w])
    for seq, gradient in enumerate(gradients(20), start=1):
        w.grad = gradient.clone()
        optimizer.step()
        reply = only(send(one, push(0, seq), (gradient, torch.zeros(2))))
        assert reply.weights is not None
        assert bits(reply.weights[0]) == bits(w)


def test_downpour_calls_nothing_but_optimizers(tmp_path: Path) -> None:
    settings = Downpour("sgd", lr=0.1)
    object.__setattr__(settings, "optimizer", "torch.save")  # as somebody's message might name it
    object.__setattr__(settings, "options", {"f": str(tmp_path / "file")})
    with pytest.raises(ConfigurationError, match=r"torch\.save is not a torch\.optim\.Optimizer"):
        shard(settings, 1)
    assert not list(tmp_path.iterdir())


def test_downpour_follows_the_workers_learning_rate_unless_given_one() -> None:
    one = shard(Downpour(), 1)
    w = values(0)[0]
    for seq, gradient in enumerate(gradients(5), start=1):
        send(one, push(0, seq, lr=0.1 * seq), (gradient, torch.zeros(2)))
        w = w - 0.1 * seq * gradient
    assert one.weights is not None
    assert torch.allclose(one.weights[0], w, rtol=1e-6)


def test_accrued_gradients_are_divided_by_their_number_if_wanted() -> None:
    results = [shard(Downpour(lr=1.0, accrued=accrued), 1) for accrued in ("sum", "mean")]
    for one in results:
        send(one, push(0, 1, steps=4), (torch.full((N,), 8.0), torch.zeros(2)))
    moved = [values(0)[0] - one.weights[0] for one in results if one.weights is not None]
    assert torch.allclose(moved[0], torch.full((N,), 8.0))
    assert torch.allclose(moved[1], torch.full((N,), 2.0))


def test_diloco_is_nesterov_on_the_mean_of_the_differences() -> None:
    one = shard(DiLoCo(lr=0.7, momentum=0.9), 2)
    w = torch.nn.Parameter(values(0)[0])
    outer = torch.optim.SGD([w], lr=0.7, momentum=0.9, nesterov=True)
    for seq in range(1, 8):
        updates = [values(10 * seq + worker)[0] for worker in range(2)]
        assert send(one, push(0, seq, one.version), (updates[0], torch.zeros(2))) == []
        assert len(send(one, push(1, seq, one.version), (updates[1], torch.zeros(2)))) == 2
        w.grad = -(updates[0] + updates[1]) / 2
        outer.step()
        assert one.weights is not None
        assert torch.allclose(one.weights[0], w, rtol=1e-5, atol=1e-6)
        assert one.version == seq


def test_delayed_nesterov_is_nesterov_for_a_buffer_of_one() -> None:
    one = shard(DelayedNesterov(lr=0.5, momentum=0.9), 1)
    w = torch.nn.Parameter(values(0)[0])
    outer = torch.optim.SGD([w], lr=0.5, momentum=0.9, nesterov=True)
    for seq in range(1, 8):
        update = values(seq)[0]
        send(one, push(0, seq, one.version), (update, torch.zeros(2)))
        w.grad = -update
        outer.step()
        assert one.weights is not None
        assert torch.allclose(one.weights[0], w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.25])
def test_delayed_nesterov_over_a_buffer_moves_as_nesterov_on_its_mean(spread: float) -> None:
    """With c = 0 the sum over a buffer is exactly -lr (mean + B m); with another c, the momentum is spread."""
    one = shard(DelayedNesterov(lr=1.0, momentum=0.5, buffer=4, spread=spread), 4)
    w, m = values(0)[0].double(), torch.zeros(N).double()
    seq = 0
    for _ in range(5):
        updates = []
        for worker in range(4):
            seq += worker == 0
            updates.append(values(7 * seq + worker)[0])
            send(one, push(worker, seq, one.version), (updates[-1], torch.zeros(2)))
        mean, before = torch.stack(updates).double().mean(0), m
        m = 0.5 * m + mean
        w = w + mean + 0.5 * (3 * spread * before + (1 - 3 * spread) * m)
        assert one.weights is not None
        assert torch.allclose(one.weights[0].double(), w, rtol=1e-4, atol=1e-5)


def test_delayed_nesterov_weighs_samples_and_counts_the_pushes_that_it_has_summed() -> None:
    one = shard(DelayedNesterov(lr=1.0, momentum=0.0), 4)
    before = values(0)[0].double()
    moved = torch.zeros(N).double()

    def sent(worker: int, seq: int, part: float, batch: float = 0.0) -> Tensor:
        update = values(10 * worker + seq)[0]
        send(one, push(worker, seq, one.version, batch=batch), (update, torch.zeros(2)))
        moved.add_(update.double(), alpha=part)
        assert torch.allclose(one.weights[0].double(), before + moved, rtol=1e-5, atol=1e-6)
        return update

    updates = [sent(worker, 1, 1 / 4) for worker in range(3)]
    one.update_members([0, 1])
    updates.append(sent(0, 2, 1 / 2))  # the momentum is the mean of all four, although two workers are left
    momentum = one._rules[0]._slots[0]["momentum"]  # type: ignore[union-attr]
    assert torch.allclose(momentum, torch.stack(updates).mean(0), rtol=1e-5, atol=1e-6)
    sent(1, 2, 1 / 2, batch=10.0)  # the other one's are taken to be as large
    sent(0, 3, 3 / 4, batch=30.0)
    sent(1, 3, 1 / 4, batch=10.0)


# ---------------------------------------------------------------------- each method's own invariant


@given(seed=st.integers(0, 1000), beta=st.floats(0.05, 1.0), workers=st.integers(1, 4))
def test_elastic_averaging_conserves_the_sum_of_worker_and_centre(seed: int, beta: float, workers: int) -> None:
    one = shard(EASGD(beta), workers)
    xs = [values(seed + 1 + worker)[0] for worker in range(workers)]
    for seq in range(1, 4):
        for worker, x in enumerate(xs):
            assert one.weights is not None
            before = (x + one.weights[0]).double()
            (force, _) = only(send(one, push(worker, seq, one.version), (x, torch.zeros(2)))).weights or ()
            x.sub_(force)
            assert torch.allclose((x + one.weights[0]).double(), before, atol=1e-5)


def test_elastic_averaging_pulls_both_towards_each_other() -> None:
    one = shard(EASGD(alpha=0.25), 2)
    x = values(1)[0]
    (force, _) = only(send(one, push(0, 1), (x, torch.zeros(2)))).weights or ()
    assert one.weights is not None
    assert torch.allclose(force, 0.25 * (x - values(0)[0]))
    assert torch.allclose(one.weights[0], values(0)[0] + force)


def test_a_refused_elastic_push_exerts_no_force() -> None:
    one = shard(EASGD(), 1)
    reply = only(send(one, push(0, 1), (torch.full((N,), math.inf), torch.zeros(2))))
    assert reply.weights is not None
    assert reply.weights[0].tolist() == [0.0] * N


def test_an_elastic_worker_shows_the_centre_at_a_sync_point_and_goes_on_from_its_own_weights() -> None:
    w = torch.zeros(4)
    exchanger = Cluster().enter(0, {"w": w}, nsync=100, algorithm=EASGD(0.5), advanced=Advanced(overlap=False))
    run(exchanger.begin())
    w += 8
    exchanger.count_step()
    for _ in range(2):  # two sync points in a row, as a validation at an epoch's end
        run(exchanger.flush())
        run(exchanger.fetch(park=True))
        assert w.tolist() == [4.0] * 4
    run(exchanger.begin())
    assert w.tolist() == [4.0] * 4  # 8 - 0.5 * 8
    w += 1
    exchanger.count_step()
    run(exchanger.flush())
    run(exchanger.fetch(park=True))
    assert w.tolist() == [4.5] * 4  # the centre: 4 + 0.5 * (5 - 4)
    run(exchanger.begin())
    assert w.tolist() == [4.5] * 4
    exchanger.close()


@given(seed=st.integers(0, 1000), workers=st.integers(1, 5))
def test_local_sgd_averages_the_workers(seed: int, workers: int) -> None:
    one = shard(LocalSGD(), workers)
    updates = [values(seed + worker)[0] for worker in range(workers)]
    due: list[Completion] = []
    for worker, update in enumerate(updates):
        assert due == []
        due = send(one, push(worker, 1), (update, torch.zeros(2)))
    assert sorted(d.request.worker for d in due) == list(range(workers))
    mean = values(0)[0] + torch.stack(updates).mean(0)
    for d in due:
        assert d.reply.weights is not None
        assert torch.allclose(d.reply.weights[0], mean, atol=1e-6)
        assert (d.reply.staleness, d.reply.version) == (0, 1)


def test_small_steps_of_workers_with_16_bit_weights_add_up() -> None:
    cluster, step = Cluster(workers=4), 2.0**-7  # the unit of rounding of 1 in bfloat16; a mean of four is below it
    weights = [torch.ones(2, dtype=torch.bfloat16) for _ in range(4)]
    workers = [cluster.enter(rank, {"w": each}, nsync=1, algorithm="asgd") for rank, each in enumerate(weights)]
    for worker in workers:
        run(worker.begin())
    for _ in range(4):
        for worker, mine in zip(workers, weights, strict=True):
            mine.add_(step)
            worker.count_step()
            run(worker.advance())
    for phase in ("flush", "fetch"):
        for worker in workers:
            run(getattr(worker, phase)())
    assert [each.tolist() for each in weights] == [[1 + 4 * step] * 2] * 4


def test_post_local_sgd_averages_every_step_at_first() -> None:
    rule = LocalSGD(post=100)
    assert [rule.period(8, step) for step in (1, 100, 101)] == [1, 1, 8]


def test_a_round_goes_on_without_a_worker_that_leaves() -> None:
    one = shard(LocalSGD(), 3)
    for worker in (0, 1):
        assert send(one, push(worker, 1), values(worker)) == []
    due = one.update_members([0, 1])
    assert sorted(d.request.worker for d in due) == [0, 1]
    assert one.version == 1


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_stale_synchronous_lets_nobody_lead_by_more_than_the_bound_and_one(bound: int) -> None:
    one = shard(ASGD(transforms=[StaleSynchronous(bound)]), 3)
    random, seqs, held = Random(bound), [0, 0, 0], set[int]()
    leads = []
    for turn in range(300):
        free = [w for w in range(3) if w not in held]
        worker = random.choices(free, [1 if w == 0 else 20 for w in free])[0]
        seqs[worker] += 1
        due = send(one, push(worker, seqs[worker], one.version), values(turn))
        held = (held | {worker}) - {d.request.worker for d in due}
        leads.append(max(seqs) - min(seqs))
    assert max(leads) == bound + 1


def test_a_worker_that_is_gone_holds_nobody_back() -> None:
    one = shard(ASGD(transforms=[StaleSynchronous(0)]), 2)
    assert send(one, push(0, 1), values(1)) == []
    assert [d.request.worker for d in one.update_members([0])] == [0]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_worker_that_returns_holds_nobody_back_for_the_pushes_that_it_missed(replaced: bool) -> None:
    one = shard(ASGD(transforms=[StaleSynchronous(1)]), 3)
    one.update_members([0, 1])  # worker 2 is gone
    for seq in range(1, 6):
        send(one, push(0, seq, one.version), values(seq))
        send(one, push(1, seq, one.version), values(seq))
    if replaced:
        one.forget(2, replaced=True)
    one.update_members([0, 1, 2])
    assert [d.request.worker for d in send(one, push(0, 6, one.version), values(6))] == [0]
    assert send(one, push(0, 7, one.version), values(7)) == []  # and it counts as one of them


def test_a_warm_start_is_over_although_worker_0_is_replaced() -> None:
    one = shard(ASGD("sum", transforms=[WarmStart(20)]), 2)
    send(one, push(0, 1, steps=20), values(1))
    one.forget(0, replaced=True)
    assert len(send(one, push(1, 1, one.version), values(2))) == 1


@given(seed=st.integers(0, 100))
def test_delay_compensation_without_strength_is_plain(seed: int) -> None:
    plain = shard(Downpour("sgd", lr=0.1), 2)
    none = shard(Downpour("sgd", lr=0.1, transforms=[DelayCompensation(0.0)]), 2)
    for turn in range(1, 6):
        for one in (plain, none):
            send(one, push(turn % 2, turn, 0), values(seed + turn))
    assert state(plain) == state(none)


def test_delay_compensation_leads_towards_the_gradient_at_the_present_weights() -> None:
    """On f = w^4 / 12 the gradient is w^3 / 3, and its true change between two points is towards the corrected one."""
    one = shard(Downpour("sgd", lr=1e-9, scale="sum", transforms=[DelayCompensation(1.0)]), 2)
    old = values(0)[0]
    send(one, replace(push(0, 1), push=False, may_wait=False))  # worker 0 starts from the first weights
    assert one.weights is not None
    one.weights[0].add_(0.1)
    update = (old**3 / 3).clone()
    one.algorithm.transforms[0].change(update, one.weights[0], {"backup": old, "square": torch.zeros(N)}, _about(1))
    there, then = one.weights[0] ** 3 / 3, old**3 / 3
    assert torch.all((update - then) * (there - then) >= 0)


def _about(steps: int) -> Any:
    from lightning_asgd.core.algorithms.base import Push

    return Push(steps=steps, lr=0.1)


def test_gap_aware_leaves_a_fresh_push_alone_and_halves_one_whose_gap_is_a_step() -> None:
    rule, update = GapAware(), torch.full((N,), 2.0)
    slots = {"square": torch.zeros(N), "backup": torch.zeros(N)}
    rule.change(update, torch.zeros(N), slots, _about(1))
    assert update.tolist() == [2.0] * N
    rule.change(update, torch.full((N,), 2.0), slots, _about(1))
    assert torch.allclose(update, torch.ones(N))


def test_dropping_nothing_is_plain_and_a_dropped_push_changes_nothing() -> None:
    plain, never, strict = (
        shard(ASGD(), 2),
        shard(ASGD(transforms=[DropStale()]), 2),
        shard(ASGD(transforms=[DropStale(1)]), 2),
    )
    for seq in range(1, 6):
        for one in (plain, never):
            send(one, push(0, seq, 0), values(seq))
    assert state(plain) == state(never)
    send(strict, push(0, 1, 0), values(1))
    before = state(strict)
    reply = only(send(strict, push(1, 1, 0), values(2)))  # computed before worker 0's push
    assert (reply.verdict, reply.staleness, strict.counts.dropped) == (Verdict.DROPPED, 1, 1)
    assert state(strict) == before
    assert only(send(strict, push(1, 2, 1), values(3))).verdict is Verdict.APPLIED


def test_rennala_takes_only_fresh_pushes_and_applies_their_mean() -> None:
    one = shard(ASGD("sum", transforms=[Rennala(2)]), 3)
    assert only(send(one, push(0, 1, 0), (torch.ones(N), torch.zeros(2)))).version == 0
    assert only(send(one, push(1, 1, 0), (3 * torch.ones(N), torch.zeros(2)))).version == 1
    assert one.weights is not None
    assert torch.allclose(one.weights[0], values(0)[0] + 2)
    assert only(send(one, push(2, 1, 0), (torch.ones(N), torch.zeros(2)))).verdict is Verdict.DROPPED


@pytest.mark.parametrize(
    ("splits", "workers", "expected"), [(1, 4, [0, 0, 0, 1]), (2, 4, [0, 1, 1, 2]), (4, 4, [1, 2, 3, 4])]
)
def test_softsync_applies_every_so_many_pushes(splits: int, workers: int, expected: list[int]) -> None:
    one = shard(ASGD(transforms=[SoftSync(splits)]), workers)
    assert [only(send(one, push(w, 1, 0), values(w))).version for w in range(workers)] == expected


def test_a_round_of_some_workers_moves_by_their_part_of_all_samples() -> None:
    one = shard(ASGD(transforms=[SoftSync(2)]), 2)  # every push is a round
    before = values(0)[0]
    send(one, push(0, 1, batch=10.0), (torch.ones(N), torch.zeros(2)))
    assert torch.allclose(one.weights[0] - before, torch.full((N,), 1 / 2))  # the other one's are taken to be as large
    send(one, push(1, 1, batch=30.0), (torch.ones(N), torch.zeros(2)))
    send(one, push(0, 2, batch=10.0), (torch.ones(N), torch.zeros(2)))
    assert torch.allclose(one.weights[0] - before, torch.full((N,), 1 / 2 + 3 / 4 + 1 / 4))


def test_dynamic_steps_follow_speed() -> None:
    one = shard(ASGD(transforms=[DynamicSteps()]), 3)
    wishes = [only(send(one, push(w, 1, nsync=12, speed=s), values(w))).nsync for w, s in enumerate((4.0, 1.0, 2.0))]
    assert wishes == [12, 3, 6]
    one.update_members([1, 2])  # the fastest is gone
    assert only(send(one, push(1, 2, nsync=12, speed=1.0), values(3))).nsync == 6


def test_a_warm_start_lets_worker_0_go_ahead_and_the_others_ramp_in() -> None:
    one = shard(ASGD("sum", transforms=[WarmStart(20, ramp=1)]), 2)
    ask = replace(push(1, 0), push=False)
    assert send(one, ask) == []
    assert [d.request.worker for d in send(one, push(0, 1, steps=10), values(1))] == [0]
    assert sorted(d.request.worker for d in send(one, push(0, 2, steps=10), values(2))) == [0, 1]
    assert one.weights is not None
    before = one.weights[0].clone()
    send(one, push(1, 1, one.version), (torch.ones(N), torch.zeros(2)))
    assert torch.allclose(one.weights[0] - before, torch.full((N,), 0.5))
    before = one.weights[0].clone()
    send(one, push(1, 2, one.version), (torch.ones(N), torch.zeros(2)))
    assert torch.allclose(one.weights[0] - before, torch.ones(N))


def test_a_warm_start_ends_when_worker_0_stands_at_a_sync_point_or_is_gone() -> None:
    for end in ("rest", "gone"):
        one = shard(ASGD(transforms=[WarmStart(1000)]), 2)
        assert send(one, replace(push(1, 0), push=False)) == []
        due = send(one, push(0, 1, rest=True, may_wait=False), values(1)) if end == "rest" else one.update_members([1])
        assert 1 in {d.request.worker for d in due}


def test_dana_slim_is_asgd_for_nesterov_workers() -> None:
    """One worker with DANA-Slim's own recurrence, beside torch's Nesterov momentum."""
    v, w = torch.zeros(N), values(0)[0]
    theirs = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, nesterov=True)
    for gradient in gradients(10):
        v = 0.9 * v + gradient
        w = w - 0.1 * (0.9 * v + gradient)
        theirs.grad = gradient
        optimizer.step()
    assert torch.allclose(w, theirs, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- misuse


def sgd(**options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: ASGD(transforms=[DelayCompensation()]),
            "DelayCompensation cannot be used with ASGD: its workers push",
        ),
        (lambda: EASGD(transforms=[ScaleByStaleness()]), "ScaleByStaleness cannot be used with EASGD"),
        (
            lambda: ASGD(transforms=[Barrier(), SoftSync()]),
            "several transforms that aggregate: Barrier, SoftSync",
        ),
        (lambda: LocalSGD(transforms=[SoftSync()]), "several transforms that aggregate"),
        (lambda: ASGD(transforms=["drop"]), "was given the transform 'drop'"),
        (lambda: EASGD(beta=1.5), r"EASGD\(beta\)=1.5. Expected a number above 0 to 1"),
        (lambda: EASGD(alpha=0.0), r"EASGD\(alpha\)=0.0"),
        (lambda: DropStale(0), r"DropStale\(limit\)=0. Expected a number of at least 1"),
        (lambda: StaleSynchronous(-1), r"StaleSynchronous\(bound\)=-1"),
        (lambda: DiLoCo(lr=0), r"DiLoCo\(lr\)=0. Expected a number above 0"),
        (lambda: DiLoCo(momentum=math.nan), r"DiLoCo\(momentum\)=nan"),
        (lambda: DelayedNesterov(buffer=2, spread=0.6), r"spread\)=0.6"),
        (lambda: DelayedNesterov(buffer=2.5), r"buffer\)=2.5. Expected a whole number"),  # type: ignore[arg-type]
        (lambda: Downpour("torch.optim.LBFGS").check(Run(2)), "LBFGS.* does not work element by element"),
        (lambda: Downpour("torch.optim.Muon").check(Run(2)), "Muon.*Expected .* a class .* that works on vectors"),
        (
            lambda: Downpour("torch.optim.Adafactor").check(Run(2)),
            "element by element: a slice of a vector is updated",
        ),
        (lambda: Downpour("nadagrad"), "Expected 'sgd', 'adagrad', 'adadelta', 'adam', or a class"),
        (lambda: Downpour("sgd", options={"betas": 1}), "Expected arguments that the optimizer accepts"),
        (lambda: Downpour(accrued="median"), r"accrued='median'"),
        (lambda: Downpour(lr=0.0), r"Downpour\(lr\)=0.0"),
        (lambda: find("sgd"), "algorithm='sgd' is unknown. Did you mean 'asgd'. Expected an object such as ASGD"),
        (lambda: find(3), "algorithm=3 is unknown"),
        (lambda: EASGD(alpha=0.5).check(Run(4)), r"with 4 workers: alpha times workers is 2.*Expected at most 0.25"),
        (lambda: algorithms.EAMSGD().check(Run(2, optimizers=sgd())), "EAMSGD was given the optimizer SGD"),
        (lambda: DANASlim().check(Run(2, nsync=1, optimizers=sgd(momentum=0.9))), "Expected torch.optim.SGD"),
        (lambda: DANASlim().check(Run(2, nsync=4, optimizers=sgd(momentum=0.9, nesterov=True))), "given nsync=4"),
    ],
)
def test_misuse_is_refused_by_name(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_making_an_algorithm_leaves_the_process_able_to_fork_workers() -> None:
    """An optimizer's step asks whether there is CUDA, which spoils later forks."""
    program = (
        "import os, sys, torch; from tests.helpers import algorithms\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(torch.cuda._is_in_bad_fork())\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


def test_every_public_algorithm_has_a_short_name_and_every_transform_is_in_the_battery() -> None:
    public = [getattr(algorithms, name) for name in algorithms.__all__]
    classes = [c for c in public if isinstance(c, type)]
    assert {c for c in classes if issubclass(c, Algorithm)} - {Algorithm} == set(algorithms._NAMED.values())
    used = {type(t) for rule in EVERY.values() for t in rule.transforms}
    assert {c for c in classes if issubclass(c, Transform)} - {Transform} == used
    assert all(find(name) == cls() for name, cls in algorithms._NAMED.items())


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 5.0), (0.5, 4.0), (1.0, 3.0)])
def test_an_answer_is_mixed_into_the_workers_weights(alpha: float, expected: float) -> None:
    w = torch.tensor([3.0])
    layout = build_layout([("w", w)], 1)
    replica = replica_for(StreamingDiLoCo(alpha=alpha), layout, [([w], 0)], [None])
    replica.merge([(torch.tensor([5.0]),)])
    assert w.item() == expected
    replica.pack()
    assert replica.wire[0][0].item() == expected - 5.0  # what it pushes next is against the servers' weights


def test_steps_that_no_push_has_brought_are_not_mixed() -> None:
    """With ``nfetch`` below ``npush`` a worker also fetches between its pushes."""
    w = torch.tensor([3.0])
    layout = build_layout([("w", w)], 1)
    replica = replica_for(StreamingDiLoCo(alpha=0.5), layout, [([w], 0)], [None])
    replica.adopt([(torch.tensor([3.0]),)])
    w.add_(2.0)
    replica.merge([(torch.tensor([10.0]),)], pushed=False)
    assert w.item() == 12.0
    replica.pack()
    assert replica.wire[0][0].item() == 2.0


def decays(algorithm: LayerWise, momentum: float, step: float) -> bool:
    """Whether SGD along gradients that are late finds the minimum of w^2 / 2."""
    a, b = algorithm.compensation(momentum)
    v, path = 0.0, [1.0] * (algorithm.delay + 1)
    for _ in range(20_000):
        gradient = path[-1 - algorithm.delay]
        v = momentum * v + gradient
        path.append(path[-1] - step * (a * v + b * gradient))
        if abs(path[-1]) > 1e6:
            return False
    return max(map(abs, path[-10:])) < 1e-3


@pytest.mark.parametrize(
    ("delay", "momentum", "compensate", "limit"),
    [
        *((0, 0.0, True, 2.0), (1, 0.0, True, 1.0), (2, 0.0, True, 0.618)),
        *((0, 0.9, True, 3.8), (1, 0.9, False, 0.1), (2, 0.9, False, 0.0513)),
        *((1, 0.9, True, 0.2535), (2, 0.9, True, 0.114)),
    ],
)
def test_late_gradients_are_stable_for_the_steps_that_the_docstring_names(
    delay: int, momentum: float, compensate: bool, limit: float
) -> None:
    algorithm = LayerWise(delay, compensate)
    assert decays(algorithm, momentum, 0.97 * limit)
    assert not decays(algorithm, momentum, 1.03 * limit)


def test_the_compensation_for_a_delay_of_one_is_nesterovs() -> None:
    assert LayerWise(1).compensation(0.9) == pytest.approx((0.9, 1.0))
    assert LayerWise(0).compensation(0.9) == (1.0, 0.0)
    assert LayerWise(3).compensation(0.5) == pytest.approx((0.125, 1.75))
    assert (LayerWise(3).lr_factor, LayerWise(3, compensate=False).lr_factor) == (0.25, 1.0)
