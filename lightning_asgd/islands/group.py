"""What the processes of an island do together: the first one decides and talks to the servers, the others follow.

All processes run the same program on different batches, so they make the same calls in the same order. In a call of
:meth:`IslandGroup.share` the first process does something and the others learn the result. Meanwhile it may give
*orders*, which every process obeys at once, such as to send its part of an update.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asgd.core.foundation.numerics import checksum

T = TypeVar("T")
E = TypeVar("E", bound=BaseException | None)

_FAIL_TOGETHER_S = 5.0
_SHORT = 8192  # bytes of a message that are sent without another message about its length


@dataclass(frozen=True)
class _Order:
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Outcome:
    call: str
    value: Any = None
    error: BaseException | None = None
    known: dict[str, Any] = field(default_factory=dict)


class IslandGroup:
    """The processes of one island. Made by all of them together, once torch's default process group exists.

    The first process may have to wait for other workers. The others wait for it up to ``patience_s`` seconds.
    """

    def __init__(self, patience_s: float = 1800.0) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._patience = datetime.timedelta(seconds=patience_s)
        self._group: Any = dist.new_group(backend="gloo", timeout=self._patience)
        meeting = datetime.timedelta(seconds=_FAIL_TOGETHER_S)
        self._failing: Any = dist.new_group(backend="gloo", timeout=meeting)
        self._subgroups: dict[tuple[int, ...], Any] = {}
        self._orders: dict[str, Callable[..., None]] = {}
        self._facts: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self.known: dict[str, Any] = {}
        """What the first process has reported at the end of the latest call of :meth:`share`, by name."""
        self._later: list[_Order] = []  # that are sent to the others with the next message
        self._shares = False  # whether the first process is within `share`
        self._votes = torch.tensor([0, 0, 1, 1, 0, 0])  # after the latest batch; see `end_batch`
        self._steps = 0  # of this process until then
        self._voting: Any = None  # until all have voted

    @property
    def leads(self) -> bool:
        """Whether this is the island's first process."""
        return self.rank == 0

    def on(self, name: str, obey: Callable[..., None]) -> None:
        """Have this process do something when it is ordered to."""
        self._orders[name] = obey

    def report(self, name: str, fact: Callable[[], Any], learn: Callable[[Any], None] = lambda _: None) -> None:
        """Have the first process report with every call of :meth:`share`; the others pass that to ``learn`` at once."""
        self._facts[name] = fact, learn

    def share(self, call: Callable[[], T]) -> T:
        """What ``call`` returns or raises on the first process. The others do not call it.

        Raises a ``RuntimeError`` on a process that shares another function than the first one, and on all if they have
        taken different numbers of optimizer steps.
        """
        if self._shares:  # the others are obeying already
            return call()
        self._counted()  # processes that have taken other steps would share other calls
        name = call.__qualname__
        if not self.leads:
            return self._follow(name)  # type: ignore[no-any-return]
        self._shares = True
        try:
            value = call()
            self.known = {name: fact() for name, (fact, _) in self._facts.items()}
            outcome = self._packed(_Outcome(name, value, known=self.known))
        except BaseException as error:
            self._send(self._packed(_Outcome(name, error=picklable(error, self.rank))))
            raise
        finally:
            self._shares = False
        self._send(outcome)
        return value

    def order(self, name: str, *arguments: Any) -> None:
        """Have every process do something, this first one too. To be called within :meth:`share`."""
        if not self._shares:
            raise RuntimeError(f"The order {name!r} was given outside of share(): no process is listening.")
        self._send(self._packed(_Order(name, arguments)))
        self._orders[name](*arguments)

    def order_later(self, name: str, *arguments: Any) -> None:
        """Have the other processes do something before what they are sent next. Called on the first one alone."""
        self._later.append(_Order(name, arguments))

    def sum(self, values: Tensor) -> Tensor:
        """Their sum over the processes. All call it together, outside of :meth:`share`."""
        dist.all_reduce(values, group=self._group)
        return values

    def any(self, decision: bool) -> bool:
        """Whether it is true on any process. All call it together."""
        if self._shares:
            return decision
        flag = torch.tensor(int(decision))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def end_batch(self, stops: bool, ends: bool, steps: int) -> tuple[bool, bool]:
        """Whether training stops, and whether the fit ends. All call it together, after every batch.

        What all processes wish happens after this batch, and what only some wish after the next one: they learn of it
        while that batch is trained, so no process waits for others that are behind. Raises a ``RuntimeError`` unless
        all have taken as many optimizer steps, at the next call or shared call.
        """
        some_stop, some_end, _, _ = self._counted()
        if some_end:  # on all: none waits for a vote that others, which raise now, may not finish
            return some_stop, True
        self._steps = steps
        self._votes = torch.tensor([stops, ends, not stops, not ends, steps, -steps], dtype=torch.int64)
        self._voting = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self._group, async_op=True)
        if not stops and not ends:
            return some_stop, some_end
        _, _, all_stop, all_end = self._counted()  # where all wish it, all count now
        return some_stop or all_stop, some_end or all_end

    def _counted(self) -> tuple[bool, bool, bool, bool]:
        """Whether some processes wished to stop and to end the fit after the latest batch, and whether all did."""
        if self._voting is not None:
            self._voting.wait()
            self._voting = None
        stop, end, go_on, fit_on, most, least = self._votes.tolist()
        self._compare(most, -least)
        return bool(stop), bool(end), not go_on, not fit_on

    def expect_same_steps(self, steps: int) -> None:
        """Raise a ``RuntimeError`` unless all processes have taken as many optimizer steps. All call it together."""
        self._counted()
        counts = torch.tensor([steps, -steps])
        dist.all_reduce(counts, dist.ReduceOp.MAX, group=self._group)
        self._steps = steps
        self._compare(int(counts[0]), -int(counts[1]))

    def _compare(self, most: int, least: int) -> None:
        if most != least:
            raise RuntimeError(
                f"Process {self.rank} of this island has taken {self._steps} optimizer steps in this fit, but others "
                f"between {least} and {most}. Expected the same steps on all processes of an island: decide about a "
                "step with a value that all of them have, such as a reduced one."
            )

    @property
    def difference(self) -> str:
        """What the latest vote says of processes that have taken other steps; empty if it says nothing, or not yet."""
        if self._voting is None or self._voting.is_completed():
            try:
                self._counted()
            except RuntimeError as error:
                return str(error)
        return ""

    def all(self, decision: bool) -> bool:
        """Whether it is true on every process. All call it together, also within an order."""
        flag = torch.tensor(int(decision))
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def agree(self, error: BaseException | None) -> BaseException | None:
        """The error of the first process that has one; None if none has. All call it together, within an order."""
        if self.all(error is None):
            return None
        met = self.gather(None if error is None else picklable(error, self.rank))
        return next(each for each in met if each is not None)

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank. All call it together."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def barrier(self) -> None:
        """Wait for all processes. All call it together, also within an order."""
        dist.barrier(group=self._group)

    def all_fail(self) -> bool:
        """Whether every process calls this within five seconds, as each does that has raised an exception."""
        try:
            dist.barrier(group=self._failing)
        except RuntimeError:
            return False
        return True

    def subgroup(self, ranks: tuple[int, ...]) -> Any:
        """Some of the processes, or all, for tensors. All processes make the same ones in the same order."""
        if ranks not in self._subgroups:
            self._subgroups[ranks] = dist.new_group(list(ranks), self._patience, backend="gloo")
        return self._subgroups[ranks]

    def close(self) -> None:
        """The fit is over on all processes: close their connections."""
        with suppress(RuntimeError):  # one of them has failed since
            self.barrier()
        for group in (self._group, self._failing, *self._subgroups.values()):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    def differing(self, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Each process's checksum of the tensors of which not all have the same values. All call it together."""
        found = self.gather({name: checksum(tensor) for name, tensor in tensors.items()})
        by_name = {name: [each[name] for each in found] for name in tensors}
        return {name: sums for name, sums in by_name.items() if len(set(sums)) > 1}

    def copy_first(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the first process's values to the others, one tensor after the other. All call it together."""
        for name in self.differing(tensors):
            tensor = tensors[name].detach()
            near = tensor.cpu().contiguous()
            self.broadcast(near.reshape(-1).view(torch.uint8), 0, tuple(range(self.size)))
            tensor.copy_(near)

    def broadcast(self, tensor: Tensor, source: int, ranks: tuple[int, ...]) -> None:
        """Give a tensor's values on one of some processes to the others, in place. It is on the CPU."""
        dist.broadcast(tensor, source, group=self.subgroup(ranks))

    def _follow(self, call: str) -> Any:
        while True:
            for got in self._receive():
                if isinstance(got, _Order):
                    self._orders[got.name](*got.arguments)
                elif got.error is not None:
                    raise got.error
                elif got.call != call:
                    raise RuntimeError(
                        f"Process {self.rank} of this island is at {call}, but process 0 at {got.call}. Expected the "
                        "same calls on all processes of an island: decide about them with a value that all of them "
                        "have, such as a reduced one."
                    )
                else:
                    self.known = got.known
                    for name, fact in got.known.items():
                        self._facts[name][1](fact)
                    return got.value

    def _packed(self, message: Any) -> bytes:
        data = pickle.dumps([*self._later, message])
        self._later = []
        return data

    def _send(self, data: bytes) -> None:
        head = torch.zeros(_SHORT, dtype=torch.uint8)
        head[:8] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        head[8 : 8 + min(len(data), _SHORT - 8)] = body[: _SHORT - 8]
        dist.broadcast(head, 0, group=self._group)
        if len(data) > _SHORT - 8:
            dist.broadcast(body[_SHORT - 8 :].clone(), 0, group=self._group)

    def _receive(self) -> Any:
        head = torch.empty(_SHORT, dtype=torch.uint8)
        dist.broadcast(head, 0, group=self._group)
        length = int.from_bytes(head[:8].numpy().tobytes(), "little")
        data = head[8 : 8 + min(length, _SHORT - 8)].numpy().tobytes()
        if length > _SHORT - 8:
            rest = torch.empty(length - (_SHORT - 8), dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self._group)
            data += rest.numpy().tobytes()
        return pickle.loads(data)


def peer_has_ended(error: BaseException) -> bool:
    """Whether gloo raised an error because another process has ended. A program's own connections may break, too."""
    return isinstance(error, RuntimeError) and "/gloo/" in str(error) and " by peer" in str(error)


def picklable(error: E, rank: int) -> E | RuntimeError:
    """The error of a process as the others raise it; None if it is None."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__} on process {rank} of the island: {error}")
    return error
