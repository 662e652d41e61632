"""One Trainer's devices divided into islands: which island a process belongs to, and how Lightning sees its place."""

from __future__ import annotations

import functools
import logging
import signal
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.job import supervisor
from lightning_asgd.core.lightning.class_trees import become_global_zero
from lightning_asgd.core.lightning.private_names import data_parallel_size, tensor_parallel_size
from lightning_asgd.core.worker.fleet import end_idle_membership
from lightning_asgd.islands import store as island_store
from lightning_asgd.islands.hosted_run import HostedRun
from lightning_asgd.world import ranks as world

log = logging.getLogger(__name__)


def size_of_islands(island: Any, inside: Any, devices: int) -> int:
    """How many devices of a machine with ``devices`` are one island, whose strategy is ``inside``."""
    if isinstance(island, int):
        return island
    data, tensor = (getattr(inside, name.attribute, "auto") for name in (data_parallel_size, tensor_parallel_size))
    if tensor == "auto":
        return devices
    return int(tensor) * (1 if data == "auto" else int(data))  # as Lightning has them on one machine


@dataclass(frozen=True)
class IslandPlace:
    """The number of a process's island, its rank in there, and the number of its processes."""

    island: int
    rank: int
    size: int


class Division:
    """The islands of one Trainer, of ``size`` processes each; ``devices`` are this machine's."""

    def __init__(self, run: HostedRun, size: int, environment: Any, devices: list[Any], num_nodes: int) -> None:
        if size < 1 or len(devices) % size:
            raise ConfigurationError(
                f"Islands of {size} device(s) were asked for on a machine with devices={len(devices)}. Expected a "
                "number of devices that is a multiple of that: an island is a group of devices of one machine."
            )
        self.run, self._size, self._environment, self._devices = run, size, environment, devices
        self.islands = num_nodes * len(devices) // size
        self._place: IslandPlace | None = None
        self._turn = False  # whether the next island waits for this process
        self._lost: set[int] = set()  # in the main process: islands of which it has named a process that has ended

    @property
    def place(self) -> IslandPlace:
        """This process's, once it runs."""
        if self._place is None:
            environment, here = self._environment, len(self._devices) // self._size
            number, rank = divmod(environment.local_rank(), self._size)
            self._place = IslandPlace(environment.node_rank() * here + number, rank, self._size)
        return self._place

    @property
    def is_first(self) -> bool:
        """Whether this is the island of the main process, which logs and writes checkpoints unless it is lost."""
        return self.place.island == 0

    def enter(self, strategy: Any) -> AbstractContextManager[None]:
        """Have a strategy see the devices of this process's island only. Its process group is made in the context."""
        end_idle_membership()
        if world.is_ours():  # of an earlier Trainer with another strategy of this package
            world.withdraw()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() != self._size:
            raise ConfigurationError(
                f"Islands of {self._size} device(s) were asked for, but this process has a process group of "
                f"{dist.get_world_size()} already, of an earlier Trainer. Expected islands of that size in all "
                "Trainers of a script, or a script for each."
            )
        world.note_island_group()
        first = self._environment.local_rank() - self.place.rank
        strategy.parallel_devices = self._devices[first : first + self._size]
        strategy.num_nodes = 1
        strategy.cluster_environment = _placed(self._environment, self.place)
        return self._meet()

    def _meet(self) -> AbstractContextManager[None]:
        """Have torch make the island's process group, unless there is one, in a file that its first process has."""
        if dist.is_initialized():
            return nullcontext()
        name = f"meeting of island {self.place.island}"
        if self.place.rank == 0:
            self.run.tell(name, island_store.offer())  # all of them are on one machine
        path = self.run.ask(name, f"The first process of island {self.place.island}")
        return island_store.meet_in(str(path), self._size)

    def speak(self) -> None:
        """Let only the main process log and warn, until the run says who does."""
        if not self.is_first:
            become_global_zero(self.place.island * self._size + self.place.rank)

    def await_report(self) -> None:
        """In the main process, whose island has lost a process: wait a moment until that is named."""
        deadline = time.monotonic() + 1.0
        while self.run.is_main and self.place.island not in self._lost and time.monotonic() < deadline:
            time.sleep(0.05)

    def watch(self) -> Callable[[], None]:
        """In the main process: expect a process to end whose island is lost. Returns a function that ends this."""
        overseer = supervisor.current()
        self._lost = lost = set()
        if not self.run.is_main or overseer is None:
            return lambda: None

        def report(rank: int, pid: int, code: int) -> None:
            island = rank // self._size
            others = range(island * self._size, (island + 1) * self._size)
            overseer.excuse(*others)
            if code and (island not in lost or (code < 0 and code != -signal.SIGTERM)):  # the others get SIGTERM
                self.run.tell(_prepared(island), True)  # the next island may wait for it
                overseer.terminate(*others)  # it may take long until they notice that one of them is lost
                then = "The other islands continue without it" if island else "The job ends with it"
                log.warning("Island %d is lost: its process %d ended with exit code %d. %s.", island, pid, code, then)
                lost.add(island)

        overseer.on_worker_exit(report)
        return lambda: overseer.on_worker_exit(None)

    # ------------------------------------------------------------------ the order in which islands begin and end

    def await_turn(self) -> None:
        """Wait for the island before this one to have prepared its data: the main process's island is the first."""
        self._turn = self.place.rank == 0
        if self.place.island and self._turn:
            before = self.place.island - 1
            self.run.ask(_prepared(before), f"Island {before}, which prepares its data first,", self.run.patience_s)

    def pass_turn(self) -> None:
        """Let the next island begin."""
        if self._turn:
            self._turn = False
            self.run.tell(_prepared(self.place.island), True)


def _prepared(island: int) -> str:
    return f"island {island} has prepared its data"


def _placed(environment: Any, place: IslandPlace) -> Any:
    """A cluster environment that knows the processes of one island."""
    known = environment if not isinstance(environment, _Placed) else environment.environment
    found = object.__new__(_placed_class(type(known)))  # type: ignore[arg-type]
    vars(found).update(vars(known), environment=known, place=place)
    return found


@functools.cache
def _placed_class(kind: type) -> Any:
    return types.new_class(f"Island{kind.__name__}", (_Placed, kind))


class _Placed:
    """A process's place in its island; the rest is the environment's."""

    environment: Any
    place: IslandPlace

    creates_processes_externally = True

    def __reduce__(self) -> Any:
        return _placed, (self.environment, self.place)

    def world_size(self) -> int:
        return self.place.size

    def global_rank(self) -> int:
        return self.place.rank

    def local_rank(self) -> int:
        return self.place.rank

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass

    def teardown(self) -> None:
        self.environment.teardown()
