"""Rules that are called tensor by tensor: rounds that end by the clock, checkpoints, snapshots, gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_asgd.algorithms import DecoupledDiLoCo, DelayedNesterov, DiLoCo, LocalSGD, RadialDirectional
from lightning_asgd.core.algorithms.base import Algorithm
from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.layout import Role, build_layout
from lightning_asgd.core.protocol import Exchange
from lightning_asgd.core.server import group_rules
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.recovery import shard_copy
from lightning_asgd.recovery.shard_copy import copied
from tests.helpers.orders import fingerprint

N = 10
GROUPS = ((Role.PARAMETER, "float32", N), (Role.PARAMETER, "float64", 2))
TENSORS = ((("first", 3), ("embed", 2), ("last", 5)), (("wide", 2),))


def shard(rule: Algorithm, workers: int = 2) -> Shard:
    made = Shard(GROUPS, rule, tensors=TENSORS)
    made.initialise((torch.zeros(N), torch.zeros(2, dtype=torch.float64)), 0)
    made.update_members(range(workers))
    return made


def push(to: Shard, worker: int, update: Tensor, now: float = 0.0, **more: Any) -> list[Completion]:
    about = {"steps": 8, "nsync": 8, "lr": 0.1, "may_wait": True, "speed": 2.0, "batch": 4.0, **more}
    seq = to.latest_push.get(worker, 0) + 1
    message = Exchange("s", worker, seq, to.version, True, True, **about)
    return to.exchange(message, (update.clone(), torch.zeros(2, dtype=torch.float64)), now)


def workers(due: Sequence[Completion]) -> list[int]:
    return sorted(each.request.worker for each in due)


def test_every_tensor_is_merged_by_itself_and_embeddings_are_averaged() -> None:
    one, other = torch.zeros(N), torch.zeros(N)
    one[0], other[1] = 2.0, 2.0  # orthogonal in the first tensor
    one[3], other[4] = 2.0, 2.0  # and in the embedding
    one[5], other[5] = 1.0, 3.0  # alike in the last
    made = shard(LocalSGD(transforms=[RadialDirectional()]))
    push(made, 0, one)
    push(made, 1, other)
    expected = torch.zeros(N)
    expected[0] = expected[1] = 2**0.5
    expected[3] = expected[4] = 1.0
    expected[5] = 2.0
    torch.testing.assert_close(made.weights[0], expected)


def test_a_round_ends_with_its_grace_period_and_later_pushes_count_in_the_next() -> None:
    made = shard(DecoupledDiLoCo(parts=1, momentum=0.0, lr=1.0, quorum=2), workers=3)
    update = torch.ones(N)
    assert push(made, 0, update, now=10.0) == []
    assert push(made, 1, update, now=11.0) == []
    assert made.tick(13.9) == []  # eight steps take four seconds, of which the quorum has used one
    due = made.tick(14.0)
    assert workers(due) == [0, 1]
    assert made.version == 1
    torch.testing.assert_close(made.weights[0], torch.full((N,), 2 / 3))  # two of three workers
    assert push(made, 2, update, now=14.5) == []
    assert made.version == 1
    push(made, 0, update, now=18.0)
    assert workers(push(made, 1, update, now=18.1)) == [0, 1, 2]
    torch.testing.assert_close(made.weights[0], torch.full((N,), 5 / 3))


def test_a_worker_that_is_lost_is_not_waited_for() -> None:
    made = shard(DecoupledDiLoCo(parts=1, quorum=3), workers=3)
    push(made, 0, torch.ones(N), now=1.0)
    push(made, 1, torch.ones(N), now=1.0)
    assert workers(made.update_members({0, 1})) == [0, 1]


def test_a_worker_with_longer_steps_weighs_what_it_has_trained() -> None:
    made = shard(DecoupledDiLoCo(parts=1, momentum=0.0, lr=1.0))
    push(made, 0, torch.full((N,), 1.0), steps=8, batch=4.0)
    push(made, 1, torch.full((N,), 4.0), steps=4, batch=4.0)
    torch.testing.assert_close(made.weights[0], torch.full((N,), 2.0))  # 8 * 16 and 4 * 16


RULES = [DiLoCo(), DelayedNesterov(), DecoupledDiLoCo(), LocalSGD(transforms=[RadialDirectional()])]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_state_is_kept_tensor_by_tensor_and_restored(rule: Algorithm) -> None:
    made, other = shard(rule), shard(rule)
    for turn in range(3):
        for worker in range(2):
            push(made, worker, torch.randn(N, generator=torch.Generator().manual_seed(2 * turn + worker)))
    other.restore(made.state())
    assert fingerprint(other.state()) == fingerprint(made.state())
    push(made, 0, torch.ones(N))  # half of a round
    kept, copy = copied(made)
    copy.finish()
    again = Shard.restore_from_snapshot(kept)
    assert fingerprint(again.state()) == fingerprint(made.state())
    for each in (made, again):  # the other worker's push is in the aggregate
        each.update_members({1})
        each.latest_push |= made.latest_push
        push(each, 1, torch.ones(N))
    assert torch.equal(again.weights[0], made.weights[0])


def test_a_checkpoint_in_the_middle_of_a_round_does_not_make_the_next_round_longer() -> None:
    made, other = (shard(LocalSGD(transforms=[RadialDirectional()])) for _ in range(2))
    push(made, 0, torch.ones(N))
    other.restore(made.state())
    for worker in range(2):
        push(other, worker, torch.ones(N))
    torch.testing.assert_close(other.weights[0], torch.ones(N))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_snapshot_is_of_one_version_whenever_pushes_come(rule: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (group_rules, shard_copy):
        monkeypatch.setattr(module, "CHUNK", 4)

    def trained() -> Shard:
        made = shard(rule)
        for worker in range(2):
            push(made, worker, torch.arange(N) / 4 + worker)
        push(made, 0, torch.ones(N))
        return made

    at_once, copy = copied(trained())
    copy.finish()
    for first in range(4):
        made = trained()
        kept, copy = copied(made)
        for _ in range(first):
            copy.step()
        push(made, 1, torch.ones(N))
        copy.finish()
        assert fingerprint(kept) == fingerprint(at_once)


def test_a_checkpoint_from_before_tensors_were_known_is_restored() -> None:
    made = Shard(GROUPS[:1], DiLoCo(momentum=0.9), tensors=TENSORS[:1])
    made.initialise((torch.zeros(N),), 0)
    momentum = torch.arange(float(N))
    buffers: dict[str, Any] = {}  # servers kept nothing for these, which were groups of their own
    made.restore([{"slots": {"momentum": momentum}, "transforms": [{}]}, buffers])
    assert [slots["momentum"].tolist() for slots in made.state()[0]["slots"]] == [
        momentum[:3].tolist(),
        momentum[3:5].tolist(),
        momentum[5:].tolist(),
    ]


def test_the_gain_of_momentum_is_in_the_replies() -> None:
    made = shard(DiLoCo(momentum=0.5, lr=1.0), workers=1)
    gains = [push(made, 0, torch.ones(N))[0].reply.gain for _ in range(3)]
    # b = 0, 1, 1.5 updates: 1 + mu + mu**2 b
    assert gains == pytest.approx([1.5, 1.75, 1.875])
    assert push(shard(LocalSGD(), workers=1), 0, torch.ones(N))[0].reply.gain == 0


def test_lengths_that_do_not_add_up_are_refused() -> None:
    for tensors in (((("a", 3),), ()), ((("a", N + 1), ("b", -1)), ()), (((("a", N),)),)):
        with pytest.raises(ProtocolError, match="laid out as"):
            Shard(GROUPS, DiLoCo(), tensors=tensors).initialise(
                (torch.zeros(N), torch.zeros(2, dtype=torch.float64)), 0
            )


def test_a_layout_names_the_parts_of_tensors_that_a_server_holds() -> None:
    named = [("a", torch.zeros(2, 3)), ("b", torch.zeros(4))]
    layout = build_layout([*named, ("c", torch.zeros(1, dtype=torch.float64))], 2)
    assert layout.named(0) == ((("a", 5),), ())
    assert layout.named(1) == ((("a", 1), ("b", 4)), (("c", 1),))
