"""Weights that a program sets at a sync point are the weights of all workers, unmixed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_asgd.algorithms import ASGD, EASGD, Algorithm, DiLoCo, Downpour, StreamingDiLoCo
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.protocol import ShardState
from lightning_asgd.core.worker.collectives import Collectives, Phase
from lightning_asgd.core.worker.participation import Participation
from lightning_asgd.core.worker.setup import newly_trainable, set_up
from lightning_asgd.core.worker.synchronizer import Synchronizer, run
from tests.component.test_collectives import together


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, -2.0, 0.25]))
        self.second = nn.Parameter(torch.ones(2, 2))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.first.fill_(value)

    @property
    def values(self) -> list[float]:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters()]).tolist()


class Part(Participation):
    """What of a worker's part looks for weights that were set."""

    def __init__(self, collectives: Collectives, module: nn.Module, synchronizer: Synchronizer) -> None:
        self._module, self.synchronizer = module, synchronizer
        about = {"collectives": collectives, "client": collectives.client, "rank": collectives.rank, "alone": False}
        self.membership: Any = SimpleNamespace(**about)
        self._warned_of_mixing = False

    def interval(self, step: float) -> None:
        """All leave the sync point, take a step and meet again."""
        self._warn_of_mixed_weights()
        run(self.synchronizer.begin())
        self._collectives.barrier("all have begun")
        self._collectives.phase = Phase.ASYNC
        with torch.no_grad():
            for parameter in self._module.parameters():
                parameter.add_(step)
                parameter.grad = torch.full_like(parameter, -step)
        self.synchronizer.count_step()
        run(self.synchronizer.advance())
        run(self.synchronizer.flush())
        self._collectives.phase = Phase.SYNC
        self._collectives.barrier("all have pushed")
        run(self.synchronizer.fetch(park=True))


def part(collectives: Collectives, algorithm: Algorithm | None = None, **settings: Any) -> tuple[Net, Part]:
    module = Net()
    config = ExchangeConfig.create(nsync=1, algorithm=algorithm or ASGD("sum"), **settings)
    assert collectives.client is not None
    return module, Part(collectives, module, set_up(collectives.client, collectives, module, config))


ALGORITHMS = [ASGD("sum"), Downpour(), EASGD(), DiLoCo(), StreamingDiLoCo(parts=2)]


@pytest.mark.parametrize("code", ["bf16", "int8", "topk"])
def test_a_code_does_not_round_weights_that_are_set(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_asgd.core.calls.shared_memory.create", lambda *_: None)  # as on another machine

    def work(collectives: Collectives, rank: int) -> Any:
        module, mine = part(collectives, ASGD(), compression=code)
        for step in (0.1, 0.7):
            mine.interval(step * (rank + 1))
            with torch.no_grad():
                module.first.copy_(torch.tensor([1 / 3, 0.0, step / 7]))
            mine.take_set_weights()
        return module.first.tolist()

    mine, theirs = together(2, work)
    assert mine == theirs == torch.tensor([1 / 3, 0.0, 0.7 / 7]).tolist()


@pytest.mark.parametrize("setting", [(0, 1), (0,)], ids=["all", "the chief"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_weights_that_are_set_are_those_of_all_and_what_was_before_is_gone(
    algorithm: Algorithm, setting: tuple[int, ...]
) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module, mine = part(collectives, algorithm)
        mine.interval(rank + 1.0)
        before = mine.synchronizer.changed()
        if rank in setting:
            module.set(64.0)
        mine.take_set_weights()
        after = module.values
        run(mine.synchronizer.begin())
        return before, after, module.values

    (before, after, begun), other = together(2, work)
    assert before == []
    assert after[:3] == [64.0] * 3
    assert after == begun == other[1] == other[2]


def test_if_only_another_worker_sets_weights_they_are_taken_back_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module, mine = part(collectives)
        if rank == 1:
            module.set(64.0)
        mine.take_set_weights()
        return module.values

    assert together(2, work) == [Net().values] * 2
    (record,) = caplog.records
    text = record.getMessage()
    assert "Weights such as 'first' were set at a sync point on workers [1], not on [0]" in text
    assert "All workers take those of worker 0" in text


def test_nothing_is_sent_to_the_servers_if_nothing_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module, mine = part(collectives)
        mine.interval(1.0)
        asked: list[Any] = []
        connection = mine.membership.client.connection
        ask = connection.ask
        monkeypatch.setattr(connection, "ask", lambda *a: [asked.append(a[1]), ask(*a)][1])
        mine.take_set_weights()
        unset = [message for message in asked if isinstance(message, ShardState)]
        module.set(2.0)
        mine.take_set_weights()
        return unset, len([message for message in asked if isinstance(message, ShardState)])

    assert together(2, work) == [([], 1), ([], 0)]


def test_servers_keep_their_momentum() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module, mine = part(collectives, DiLoCo(momentum=0.5, lr=1.0))
        mine.interval(1.0)
        before = mine.synchronizer.state()
        module.set(64.0)
        mine.take_set_weights()
        return before, mine.synchronizer.state()

    for before, after in together(2, work):
        assert str(before) == str(after)
        assert "momentum" in str(before)


def test_a_server_that_is_restored_meanwhile_gets_them_again() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module, mine = part(collectives)
        connection, calls = mine.membership.client.connection, []
        replace = mine.synchronizer.replace

        def lost_once(weights: Any, *, sends: bool) -> None:
            replace(weights, sends=sends)
            calls.append(sends)
            if len(calls) == 1:
                connection.restored[0] += rank  # worker 1 hears of it between this and the fetch

        mine.synchronizer.replace = lost_once  # type: ignore[method-assign]
        module.set(64.0)
        mine.take_set_weights()
        return calls, module.values[:3]

    assert together(2, work) == [([True, True], [64.0] * 3), ([False, False], [64.0] * 3)]


def test_what_is_set_after_that_is_pushed_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module, mine = part(collectives)
        for _ in range(2):
            if rank == 1:
                module.set(8.0)
            mine.interval(0.0)
        return None

    together(2, work)
    (record,) = caplog.records
    assert "Weights such as 'first' were set on worker 1 while other workers train" in record.getMessage()


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_training_is_not_taken_for_weights_that_were_set(
    algorithm: Algorithm, caplog: pytest.LogCaptureFixture
) -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        _, mine = part(collectives, algorithm)
        for turn in range(3):
            mine.interval(0.1 * (rank + turn))
            mine.take_set_weights()
        return mine.synchronizer.changed()

    assert together(2, work) == [[], []]
    assert not caplog.records


def test_a_norm_that_every_forward_keeps_is_no_weight_that_was_set() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module = nn.Embedding(4, 2, max_norm=0.5)
        assert collectives.client is not None
        config = ExchangeConfig.create(nsync=1)
        mine = Part(collectives, module, set_up(collectives.client, collectives, module, config))
        module(torch.arange(4))
        return mine.synchronizer.changed(), mine._set_by_program()

    assert together(2, work) == [(["weight"], [])] * 2


def test_a_parameter_without_elements_is_not_new() -> None:
    def work(collectives: Collectives, rank: int) -> Any:
        module, mine = part(collectives)
        module.late = nn.Parameter(torch.ones(2))
        return "empty" in mine._exchanged, list(newly_trainable(module, mine.synchronizer.layout))

    assert together(2, work) == [(False, ["late"])] * 2
