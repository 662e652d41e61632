"""Islands whose processes are actors of one test: their group passes messages without a network."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.islands.group import IslandGroup

__all__ = ["ActorGroup", "Talk"]


class Talk:
    """What the processes of one island say to each other."""

    def __init__(self, size: int, wait_until: Callable[[Callable[[], bool]], None]) -> None:
        self.size = size
        self.said: list[bytes] = []  # by the first process
        self.met: dict[Any, dict[int, bytes]] = {}
        self._wait_until = wait_until

    def wait(self, condition: Callable[[], bool]) -> None:
        if not condition():
            self._wait_until(condition)


class ActorGroup(IslandGroup):
    """The group as one of the processes has it."""

    def __init__(self, talk: Talk, rank: int) -> None:
        self.rank, self.size = rank, talk.size
        self.known = {}
        self._orders, self._facts, self._later, self._shares = {}, {}, [], False
        self._votes, self._voting = torch.tensor([0, 0, 1, 1, 0, 0]), None
        self._talk = talk
        self._heard = 0
        self._meetings: Counter[Any] = Counter()

    def all(self, decision: bool) -> bool:
        return all(self.gather(decision))

    def gather(self, value: Any) -> list[Any]:
        return self._meet(value, tuple(range(self.size)))

    def expect_same_steps(self, steps: int) -> None:
        assert self.all(steps == self.gather(steps)[0])

    def barrier(self) -> None:
        self.gather(None)

    def subgroup(self, ranks: tuple[int, ...]) -> None:
        pass

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> None:
        values = self._meet(tensor, ranks)
        tensor.copy_(values[ranks.index(source)])

    def _meet(self, value: Any, ranks: tuple[int, ...]) -> list[Any]:
        self._meetings[ranks] += 1
        met = self._talk.met.setdefault((ranks, self._meetings[ranks]), {})
        met[self.rank] = pickle.dumps(value)
        self._talk.wait(lambda: len(met) == len(ranks))
        return [pickle.loads(met[rank]) for rank in ranks]

    def _send(self, data: bytes) -> None:
        self._talk.said.append(data)

    def _receive(self) -> Any:
        self._talk.wait(lambda: len(self._talk.said) > self._heard)
        self._heard += 1
        return pickle.loads(self._talk.said[self._heard - 1])
