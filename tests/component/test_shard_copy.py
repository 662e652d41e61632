"""A snapshot is of one version, though pushes go on while it is copied; and no message waits for all of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lightning_asgd.algorithms import ASGD, Algorithm
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol import Attach, Exchange, InitShard, Policy, Reply, RunMetadata
from lightning_asgd.core.server import group_rules
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.recovery import shard_copy
from lightning_asgd.recovery.server import recovery_of
from lightning_asgd.recovery.shard_copy import copied
from tests.helpers.algorithms import ON_SERVERS
from tests.helpers.orders import fingerprint

GROUPS = ((Role.PARAMETER, "float32", 10), (Role.PARAMETER, "float64", 5), (Role.PARAMETER, "float16", 2))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (group_rules, shard_copy):
        monkeypatch.setattr(module, "CHUNK", 4)


def tensors(seed: int) -> tuple[torch.Tensor, ...]:
    chance = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(-4, 5, (n,), generator=chance).to(getattr(torch, kind)) for _, kind, n in GROUPS)


def push(shard: Shard, seq: int) -> None:
    for worker in range(2):
        shard.exchange(Exchange("s", worker, seq, 0, True, False, lr=0.1, steps=1), tensors(10 * seq + worker))


def trained(rule: Algorithm) -> Shard:
    torch.manual_seed(0)  # of samplers
    shard = Shard(GROUPS, rule)
    shard.initialise(tensors(0), 0)
    shard.update_members(range(2))
    push(shard, 1)
    return shard


@pytest.mark.parametrize("name", ON_SERVERS)
def test_a_copy_is_of_one_version_whenever_pushes_come(name: str) -> None:
    at_once, copy = copied(trained(ON_SERVERS[name]))
    pieces = 0
    while copy.left:
        copy.step()
        pieces += 1
    assert pieces == 6
    for first in range(pieces):
        shard = trained(ON_SERVERS[name])
        kept, copy = copied(shard)
        for _ in range(first):
            copy.step()
        push(shard, 2)
        copy.step()
        push(shard, 3)
        copy.finish()
        assert fingerprint(kept) == fingerprint(at_once)


def test_what_replaces_the_weights_of_a_shard_does_not_reach_a_copy() -> None:
    for replaces in (
        lambda shard: shard.resume(tensors(5), 9, {}),
        lambda shard: shard.initialise(tensors(5), 9),
        lambda shard: shard.replace(tensors(5)),
        lambda shard: shard.restore(shard.state()),
        lambda shard: copied(shard)[1].finish(),
    ):
        shard = trained(ASGD("sum"))
        expected = [w.tolist() for w in shard.weights]
        kept, copy = copied(shard)
        copy.step()
        replaces(shard)
        push(shard, 2)
        copy.finish()
        assert [w.tolist() for w in kept["weights"]] == expected


def test_messages_are_handled_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    service, answers = Service(lambda: 0.0, run="s"), list[Any]()
    service.handle(Attach("s", "here", Policy(0.0)))
    service.handle(InitShard("s", 1, GROUPS, ASGD("sum"), tensors(0)))
    service.handle(RunMetadata("s", 1, "founded", True))

    def another_thread_pushes(_: float) -> None:
        message = Exchange("s", 1, len(answers) + 1, 0, True, True, tensors(1))
        thread = threading.Thread(target=lambda: answers.append(service.handle(message)), daemon=True)
        thread.start()
        thread.join(20.0)
        assert not thread.is_alive(), "the lock is held"

    monkeypatch.setattr(shard_copy.time, "sleep", another_thread_pushes)
    snapshot = recovery_of(service).snapshot()
    assert snapshot is not None
    assert snapshot.version == 0
    assert [w.tolist() for w in snapshot.shards[0]["weights"]] == [w.tolist() for w in tensors(0)]
    assert answers
    assert all(isinstance(answer, Reply) for answer in answers)
    after = recovery_of(service).snapshot()
    assert after is not None
    assert after.version >= len(answers) - 1 > 0
