"""Every algorithm over every transport: a scripted order gives a bare shard's bits, in server processes too."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.protocol import Exchange, InitShard, Join
from lightning_asgd.core.server.shard import Shard
from lightning_asgd.core.worker.connection import done_within
from tests.helpers.algorithms import ON_SERVERS
from tests.helpers.script import bits
from tests.transport.conftest import Link

N, WORKERS, WAIT_S = 5, 3, 20.0
GROUPS = ((Role.PARAMETER, "float32", N),)


def script(seed: int) -> list[tuple[int, float]]:
    """Who pushes, and how old its base is: every worker as often as the others, in any order within a round."""
    random, turns = Random(seed), []
    for _ in range(6):
        order = list(range(WORKERS))
        random.shuffle(order)
        turns += [(worker, random.randrange(3)) for worker in order]
    return turns


def push(session: str, worker: int, seq: int, base: int, turn: int) -> Exchange:
    update = torch.randn(N, generator=torch.Generator().manual_seed(turn))
    about: dict[str, Any] = {"steps": 2, "lr": 0.1, "nsync": 2, "speed": 1.0 + worker, "may_wait": True}
    return Exchange(session, worker, seq, base, True, True, (update,), **about)


# Nobody knows when a message whose answer is held back has reached another process, so that the next one may be sent.
AT_ONCE = sorted(name for name, rule in ON_SERVERS.items() if not rule.waits)


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_scripted_order_has_the_bits_of_a_bare_shard(name: str, link: Link) -> None:
    algorithm, first = ON_SERVERS[name], torch.randn(N, generator=torch.Generator().manual_seed(99))
    bare = Shard(GROUPS, algorithm)
    bare.initialise((first.clone(),), 0)
    bare.update_members(range(WORKERS))
    for worker in range(WORKERS):
        link.transport.call(0, Join(link.session, worker, WORKERS), WAIT_S).wait()
        weights = (first,) if worker == 0 else None
        link.transport.call(0, InitShard(link.session, worker, GROUPS, algorithm, weights), WAIT_S).wait()
    for turn, (worker, age) in enumerate(script(seed=len(name))):
        seq, base = turn // WORKERS + 1, max(0, bare.version - age)
        message = push("bare", worker, seq, base, turn)
        (due,) = bare.exchange(message, message.update)
        future = link.transport.call(0, push(link.session, worker, seq, base, turn), WAIT_S)
        assert done_within(future, WAIT_S)
        mine, theirs = due.reply, future.wait()
        for what in ("version", "staleness", "verdict", "nsync"):
            assert getattr(mine, what) == getattr(theirs, what)
        assert bits(mine.weights[0]) == bits(theirs.weights[0])
    assert bare.version > 0
