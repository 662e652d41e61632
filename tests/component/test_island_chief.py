"""An island becomes chief on all of its processes before the same batch, wherever its first process has heard of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.protocol import Policy
from lightning_asgd.core.worker.metrics_board import MetricsBoard
from lightning_asgd.core.worker.participation import Participation
from lightning_asgd.elastic.attachment import Attachment
from lightning_asgd.islands.fleet import IslandFleet
from lightning_asgd.sampling.optim import SGLD
from tests.helpers.actor_islands import ActorGroup, Talk

FILES = "the chief's files"


def nothing_was_said(condition: Any) -> None:
    raise AssertionError("a process waits for what the first one has not said")


class Process(IslandFleet):
    """One process's membership in a run with worker 3; the coordinator's answers need a recovery of a server."""

    def __init__(self, talk: Talk, rank: int) -> None:
        self.group, self.files = ActorGroup(talk, rank), list[Any]()
        self.restored: list[int] = []
        self.group.on("restore", self.restored.append)
        shell: Any = SimpleNamespace(speak_as=lambda _: None, adopt_checkpoint_states=self.files.append)
        job: Any = None
        super().__init__(self.group, job, ExchangeConfig.create(nsync=1), Policy(60.0), MetricsBoard(), shell)
        self._begun = True

    def _find(self) -> None:
        if self.group.leads:
            self.client: Any = SimpleNamespace(connection=SimpleNamespace(worker=3), note=self.note)
            self.attachment = Attachment(self.client, self._change_chief)
        else:
            self.client = None
            self.sender: Any = SimpleNamespace(connection=SimpleNamespace(worker=3))

    def note(self, name: str) -> str:
        self.group.order("restore", 1)
        return FILES

    def train(self, batches: int, shares: set[int]) -> list[list[Any]]:
        """The files that this process knew of before each batch; it hears that it is chief before batch 3."""
        known = []
        for number in range(batches):
            if number == 3 and self.group.leads:
                self.attachment.note_chief(3)
            self.follow_chief()
            known.append(list(self.files))
            if number in shares:
                self.group.share(lambda: None)
        return known


@pytest.mark.parametrize("shares", [{0, 5, 7}, {2, 3, 4}, {0}])
def test_all_processes_adopt_the_files_of_the_chief_before_the_same_batch(shares: set[int]) -> None:
    talk = Talk(2, nothing_was_said)
    first, other = (Process(talk, rank) for rank in (0, 1))
    expected = next((number + 1 for number in sorted(shares) if number >= 3), 10)
    for each in (first, other):  # the second one reads what the first one has said
        assert each.train(10, shares) == [[]] * expected + [[FILES]] * (10 - expected)
        assert each.restored == [1] * (expected < 10)
    assert first.attachment.chief == (expected < 10)
    assert len(talk.said) == len(shares) + 3 * (expected < 10)  # the call, its order, and the server's recovery


def test_a_process_that_shares_another_call_than_the_first_one_says_so() -> None:
    talk = Talk(2, nothing_was_said)
    first, second = ActorGroup(talk, 0), ActorGroup(talk, 1)

    def exchange() -> int:
        return 1

    def claim() -> int:
        return 2

    assert first.share(exchange) == 1
    assert second.share(exchange) == 1
    first.share(exchange)
    with pytest.raises(RuntimeError, match=r"Process 1 of this island is at .*claim, but process 0 at .*exchange\."):
        second.share(claim)


def test_all_processes_of_an_island_draw_the_same_noise_whether_it_is_chief_or_not() -> None:
    talk = Talk(2, nothing_was_said)
    first, other = (Process(talk, rank) for rank in (0, 1))
    first._begun = False  # it has no files to take over
    first.attachment.note_chief(3)
    first.attachment.update()
    assert (first.rank, other.rank) == (0, 3)
    noise = [drawn_by(member) for member in (first, other)]
    assert torch.equal(*noise)
    first.client.connection.worker = 4  # another island's
    assert not torch.equal(drawn_by(first), noise[0])


def drawn_by(member: IslandFleet) -> torch.Tensor:
    """A step of a sampler without a gradient's part: its noise."""
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.zeros(4)
    sampler, config = SGLD([weight], lr=0.1, num_data=1, seed=0), ExchangeConfig.create(nsync=1)
    worker: Any = SimpleNamespace(membership=member, config=config, optimizers=[sampler])
    Participation._share_posterior(worker)
    sampler.step()
    return weight.detach()
