# ruff: noqa: D102 - the methods without docstrings are those that torch declares
"""A backend of ``torch.distributed`` whose collectives go through the coordinator.

Workers are connected to the parameter servers, not to each other. At sync points and outside of a fit a collective of
this group reaches all living workers. In the asynchronous phase workers take steps at different times, so it could not
pair up: it raises :class:`~lightning_asgd.errors.CollectiveUnavailableError` at once. Rank, world size and groups of a
single rank are served at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asgd.core.foundation.errors import CollectiveMismatchError, CollectiveUnavailableError
from lightning_asgd.core.protocol.reductions import reduce
from lightning_asgd.core.worker.collectives import Collectives, Phase, reduce_op_name, unequal

log = logging.getLogger(__name__)

BACKEND = "asgd"
"""Name of the backend, as ``torch.distributed.get_backend()`` returns it."""

_dist: Any = dist  # a build without it lacks the names below; asked for only when used


@dataclass
class RankInfo:
    """A worker's rank, and its place among machines."""

    rank: int  # of the worker
    world_size: int  # number of workers
    local_rank: int  # of the worker on its machine
    local_world_size: int  # number of workers on its machine
    node_rank: int  # of its machine
    num_nodes: int  # number of machines
    collectives: Callable[[], Collectives]  # returns the worker's collectives, which may change
    # Whether there are sync points of all workers. In a run that workers join and leave there are none.
    meets: bool = True
    # Returns a key-value store that all workers reach, for process groups of other backends; None without one.
    store: Callable[[], Any] | None = None
    encrypted: bool = False  # whether the job's connections are. If so, groups of other backends are refused
    forked: bool = False
    """Whether this process is one that the worker has forked, such as a DataLoader's."""

    def variables(self) -> dict[str, str]:
        """The environment variables that libraries read in place of ``torch.distributed``.

        None for a worker that is alone in its job: a later Trainer with several devices would take them for those of a
        process that another launcher has started.
        """
        if self.meets and self.world_size == 1:
            return {}
        found = {"RANK": self.rank, "GLOBAL_RANK": self.rank, "WORLD_SIZE": self.world_size}
        if self.meets:  # else the others' machines are unknown
            found |= {"LOCAL_RANK": self.local_rank, "LOCAL_WORLD_SIZE": self.local_world_size}
            found |= {"NODE_RANK": self.node_rank, "NNODES": self.num_nodes}
        return {name: str(value) for name, value in found.items()}


class GuardedStore(_dist.Store if dist.is_available() else object):  # type: ignore[misc]
    """The store behind the default group, which only process groups of other backends use.

    It connects to the job's rendezvous when it is first used, and raises an error where there are no sync points.
    """

    def __init__(self, place: Callable[[], RankInfo | None]) -> None:
        super().__init__()
        self._place = place
        self._store: Any = None

    def _open(self) -> Any:
        place = self._place()
        if place is not None and place.encrypted:
            raise CollectiveUnavailableError(
                "A process group with one of torch's own backends was requested with transport='zmq', but its traffic "
                "would not be encrypted. Expected new_group(), or new_group(backend='gloo'), with all ranks or a "
                "single rank: A-SGD's own backend serves these."
            )
        alone = (Phase.ASYNC, Phase.ENTERING)
        if place is None or place.store is None or not place.meets or place.collectives().phase in alone:
            raise CollectiveUnavailableError(
                "A process group with one of torch's own backends was requested where A-SGD workers do not "
                "synchronise. Expected new_group(backend=...) outside of training steps, in a job whose workers start "
                "together: call it in setup() or on_fit_start()."
            )
        if self._store is None:
            self._store = place.store()
            log.warning(
                "A process group with one of torch's own backends was created. Its calls wait for all of its ranks, "
                "even between two sync points: make them only at sync points and outside of fit. They are neither "
                "encrypted nor authenticated."
            )
        return self._store

    def set(self, key: Any, value: Any) -> None:
        self._open().set(key, value)

    def get(self, key: Any) -> Any:
        return self._open().get(key)

    def add(self, key: Any, amount: int) -> int:
        return int(self._open().add(key, amount))

    def check(self, keys: Any) -> bool:
        return bool(self._open().check(keys))

    def wait(self, keys: Any, *timeout: Any) -> None:
        self._open().wait(keys, *timeout)

    def compare_set(self, key: Any, expected: Any, desired: Any) -> Any:
        return self._open().compare_set(key, expected, desired)

    def delete_key(self, key: Any) -> bool:
        return bool(self._open().delete_key(key))

    def num_keys(self) -> int:
        return int(self._open().num_keys())

    def set_timeout(self, timeout: Any) -> None:
        """Ignored: every call has its own time-out."""


def _done(result: Any) -> Any:
    """The work of a completed collective."""
    # A subclass of torch's ``Work`` would not do: torch 2.6 waits for one in C++, and does not call its methods.
    future: Any = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class WorkersGroup(_dist.ProcessGroup if dist.is_available() else object):  # type: ignore[misc]
    """All workers, or this one alone (``place`` gives None). ``torch.distributed``'s functions call its methods."""

    def __init__(self, rank: int, size: int, place: Callable[[], RankInfo | None] = lambda: None) -> None:
        super().__init__(rank, size)
        self._place = place
        self._name = ""  # torch asks for it once it has forgotten the group itself

    def rank(self) -> int:
        place = self._place()
        return 0 if place is None else place.rank

    def size(self) -> int:
        place = self._place()
        return 1 if place is None else place.world_size

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        self._name = str(_dist.distributed_c10d._world.pg_names.get(self, self._name))
        return self._name

    @property
    def group_name(self) -> str:
        return self.pg_name

    def __repr__(self) -> str:
        return f"<A-SGD process group, rank {self.rank()} of {self.size()}>"

    # ------------------------------------------------------------------ what reaches the others

    def _complete(self, call: str, mine: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of every rank in order. Raises if a rank is missing."""
        if self.size() == 1:
            return [list(mine)]
        collectives = served_through(call, self._place())
        found = collectives.gather("torch.distributed", call, [t.detach().cpu() for t in mine])
        tensors = [found.get(rank, []) for rank in range(self.size())]
        self._need_all(call, [rank for rank, theirs in enumerate(tensors) if theirs])
        return tensors

    def _from(self, root: int, call: str, mine: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of one rank."""
        if self.size() == 1:
            return list(mine)
        collectives = served_through(call, self._place())
        sent = [t.detach().cpu() for t in mine] if root == self.rank() else None
        answer = collectives.reduced("torch.distributed", f"{call} from rank {root}", sent, "given")
        if root not in answer.ranks:
            _lack(call, [root])
        return list(answer.value)

    def _reduced(self, call: str, op: str, mine: Sequence[Tensor], *, by_all: bool = False) -> list[Tensor]:
        """The ranks' tensors, combined one by one. Raises if a rank is missing and ``by_all`` is set."""
        if self.size() == 1:
            return list(reduce(op, {0: list(mine)}).value)
        collectives, sent = served_through(call, self._place()), [t.detach().cpu() for t in mine]
        answer = collectives.reduced("torch.distributed", f"{call} {op}", sent, op)
        if by_all:
            self._need_all(call, answer.ranks)
        return list(answer.value)

    def _need_all(self, call: str, ranks: Collection[int]) -> None:
        """Raise unless these are all ranks."""
        if len(ranks) < self.size():
            _lack(call, sorted(set(range(self.size())).difference(ranks)))

    def barrier(self, *_: Any, **__: Any) -> Any:
        if self.size() > 1:
            served_through("barrier", self._place()).reduced("torch.distributed", "barrier", None, "given")
        return _done([])

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Lightning calls it around ``prepare_data``. In an elastic run each worker prepares its data; none waits."""
        place = self._place()
        if place is not None and place.meets and self.size() > 1:
            collectives = served_through("monitored_barrier", place)
            collectives.reduced("torch.distributed", "monitored_barrier", None, "given", endless=True)

    def shutdown(self) -> None:
        self._name = self.pg_name

    def broadcast(self, tensors: Any, options: Any) -> Any:
        found = self._from(options.rootRank, "broadcast", tensors)
        if self.rank() != options.rootRank:
            _fill("broadcast", tensors, found)
        return _done(tensors)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        op = "sum" if options is None else reduce_op_name(options.reduceOp)
        _fill("all_reduce", tensors, self._reduced("all_reduce", op, tensors))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, options: Any) -> Any:
        result = self._reduced("reduce", reduce_op_name(options.reduceOp), tensors)
        if self.rank() == options.rootRank:
            _fill("reduce", tensors, result)
        return _done(tensors)

    def allgather(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        found = self._complete("all_gather", inputs)
        for index, output in enumerate(outputs):
            _fill_by_rank("all_gather", output, [tensors[index] for tensors in found])
        return _done(outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        for output, tensors in zip(outputs, self._complete("all_gather_coalesced", inputs), strict=True):
            _fill("all_gather_coalesced", output, tensors)
        return _done(outputs)

    def all_gather_single(self, output: Any, input: Any, *_: Any, **__: Any) -> Any:
        found = self._complete("all_gather_into_tensor", [input])
        parts = output.view(-1).tensor_split(len(found))  # equal ones, if the output is as long as all of them
        _fill_by_rank("all_gather_into_tensor", parts, [tensors[0] for tensors in found])
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        found = self._complete("gather", inputs)
        if self.rank() == options.rootRank:
            _fill_by_rank("gather", outputs[0], [tensors[0] for tensors in found])
        return _done(outputs)

    def scatter(self, outputs: Any, inputs: Any, options: Any) -> Any:
        mine = inputs[0] if self.rank() == options.rootRank else []
        _fill("scatter", outputs, [self._from(options.rootRank, "scatter", mine)[self.rank()]])
        return _done(outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any) -> Any:
        result = self._reduced("reduce_scatter", reduce_op_name(options.reduceOp), inputs[0], by_all=True)
        _fill("reduce_scatter", outputs, [result[self.rank()]])
        return _done(outputs)

    def reduce_scatter_single(self, output: Any, input: Any, options: Any) -> Any:
        parts = [part.view(output.shape) for part in input.reshape(-1).chunk(self.size())]
        return self.reduce_scatter([output], [parts], options)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, options)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        found = self._complete("all_to_all", inputs)
        _fill("all_to_all", outputs, [tensors[self.rank()] for tensors in found])
        return _done(outputs)

    def all_to_all_single(self, output: Any, input: Any, to: Any, sizes: Any, *_: Any, **__: Any) -> Any:
        rows = input.split(list(sizes) or len(input) // self.size())
        found = self._complete("all_to_all_single", rows)
        _fill("all_to_all_single", [output], [torch.cat([tensors[self.rank()] for tensors in found])])
        return _done([output])

    alltoall_base = all_to_all_single

    def _unsupported(self, call: str) -> Any:
        raise CollectiveUnavailableError(
            f"torch.distributed.{call} was called. Expected a collective of all workers: A-SGD's workers are "
            "connected to the parameter servers, not to each other. Use broadcast or all_gather at a sync point."
        )

    def send(self, *_: Any, **__: Any) -> Any:
        return self._unsupported("send")

    def recv(self, *_: Any, **__: Any) -> Any:
        return self._unsupported("recv")

    recv_anysource = recv


def served_through(call: str, place: RankInfo | None) -> Collectives:
    """The collectives of a worker, if the others take part in collectives now."""
    if place is None:
        why, what = "after this process has left its job", "the call before the Trainer's end"
    elif place.forked:
        why = "in a process that a worker has started, such as a DataLoader's"
        what = "it in the worker itself"
    elif not place.meets:
        why = "in an elastic run, where there is no moment at which all workers meet"
        what = "no collective: let one worker do this work alone"
    elif place.collectives().phase in (Phase.ASYNC, Phase.ENTERING):
        why = "in the asynchronous phase, where workers take their steps at different times and none waits"
        what = (
            "it at a sync point (on_train_epoch_end, on_validation_*, on_fit_start, on_train_end) or outside of fit. "
            "If a library calls it in every step, turn its synchronisation off; to reduce values use "
            "self.log(..., on_epoch=True, sync_dist=True)"
        )
    elif place.collectives().real:
        return place.collectives()
    else:
        why, what = "after this worker has lost its job", "the call before that"
    raise CollectiveUnavailableError(f"torch.distributed.{call} was called {why}. Expected {what}.")


def _lack(call: str, ranks: list[int]) -> None:
    raise CollectiveUnavailableError(
        f"torch.distributed.{call} needs every rank, but ranks {ranks} are lost. Expected a call that the remaining "
        f"ranks can complete, such as all_reduce or barrier. Look at the output of the missing ranks."
    )


def _fill_by_rank(call: str, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Fill outputs with one tensor of each rank."""
    if not _fits(targets, values) and len({value.shape for value in values}) > 1:
        raise unequal(f"torch.distributed.{call}", dict(enumerate(values)))
    _fill(call, targets, values)


def _fill(call: str, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if not _fits(targets, values):
        given, came = ([tuple(each.shape) for each in tensors] for tensors in (targets, values))
        raise CollectiveMismatchError(
            f"torch.distributed.{call} was given outputs of shapes {given} for tensors of shapes {came}. Expected, "
            "on every rank, outputs with the shapes of the tensors that the ranks send."
        )
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value.reshape(target.shape))


def _fits(targets: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    return [target.numel() for target in targets] == [value.numel() for value in values]
