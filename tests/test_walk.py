"""How far an update walks, from the hook before a batch to the worker's weights. The numbers may only fall.

A *room* is a file of the package, a *frame* a distinct function in it; lambdas and comprehensions are part of the
function that they stand in. A real Trainer of ``pytorch_lightning`` trains leased data as worker 0 of two. Its server
is a ``Service`` in this process, behind a link that numbers calls and answers them once, as both transports do (see
``reliable_calls``). Worker 1 is an echo: it says in every collective what worker 0 says, and trains nothing.
``sys.setprofile`` watches the strategy's hooks, and what its callback calls when a batch ends, in the training thread,
without what Lightning calls back within them, such as the closure of a step.

An exchange takes two batches: before one it falls due, is sent and is answered; before the next the answer is merged.
A frame that is entered in these two ``on_train_batch_start`` *carries* the exchange if it is given the update, its
message or its answer as an argument or returns it, or if it is waiting for another frame of which that is true.
Update and weights are all tensors but the batch's; message and answer are ``Exchange`` and ``Reply``, by themselves,
in lists, tuples and dictionaries, or in a future that is done. All other frames are side visits.

A *step* is a whole batch in which no exchange begins or ends, with the hooks ``on_train_batch_start``,
``optimizer_step`` and ``FitSession.after_batch``. A frame carries it if ``strategy.stats.steps`` grew while it was on
the stack.

The first count, by reading, found 13 rooms and 48 frames that carry, of them one room and five frames in
``transports/rpc``, which is not walked through here. The definition above leaves out frames that neither take nor give
tensors, such as ``Replica.updates`` where memory is shared, and of a step ``accrue``, which does something else than
count ``stats.steps``.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import pytorch_lightning as pl
from torch import Tensor, nn
from torch.futures import Future

import lightning_asgd
from lightning_asgd import ASGDStrategy
from lightning_asgd.core.calls.reliable_calls import Acknowledgements, ReplyCache
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.job.training_job import TrainingJob
from lightning_asgd.core.protocol import Contribution, Exchange, Heartbeat, InitShard, Join, Leave, Reply
from lightning_asgd.core.server.service import Service
from tests.component.test_exchange import NEEDS_SHARED_MEMORY
from tests.helpers.ratchet import complaints
from tests.lightning.models import Regression, loader, trainer

ROOT = f"{Path(lightning_asgd.__file__).parent}/"
LIGHTNING = f"{Path(pl.__file__).parent}/"
NSYNC = 4
HOOKS = ("on_train_batch_start", "optimizer_step")

RECORDED = {
    "exchange: rooms that carry": 13,  # core/server/group_rules is one: what rules keep, by tensor or vector
    "exchange: frames that carry": 29,
    # core/lightning/private_names, core/worker/participation and programs/weight_changes are three. The last one looks
    # before each batch whether a program has set weights.
    "exchange: rooms entered": 27,
    "step: rooms that carry": 3,
    "step: frames that carry": 3,
    "step: rooms entered": 14,
}


# ---------------------------------------------------------------------- a fit in this process


class Link(Transport):
    """Both ends of a connection to one server, and worker 1's echo of worker 0."""

    addresses = ("here",)

    def __init__(self) -> None:
        self._service = Service(time.monotonic)
        self._once, self._acknowledgements, self._numbers = ReplyCache(), Acknowledgements(), itertools.count(1)

    @property
    def num_servers(self) -> int:
        return 1

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        if isinstance(message, Join | InitShard | Contribution | Heartbeat | Leave):
            echo = replace(message, worker=1)
            self._send("worker 1", replace(echo, weights=None) if isinstance(echo, InitShard) else echo)
        return self._send("worker 0", message)

    def _send(self, caller: str, message: Any) -> Future[Any]:
        number, received, answered = next(self._numbers), copy.deepcopy(message), Future[Any]()

        def bring(done: Future[Any]) -> None:
            self._acknowledgements.note(number)
            answered.set_result(copy.deepcopy(done.value()))

        answer = self._once.answer(
            caller, number, self._acknowledgements.take(), lambda: self._service.handle(received)
        )
        answer.add_done_callback(bring)
        return answered

    def close(self) -> None:
        self._service.close()


class Enough(Exception):
    """What was to be seen was seen."""


class Watcher(pl.Callback):
    """Records a walk per batch and hook, and ends the fit when an exchange and a step have been seen."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.batches: list[dict[str, Walk]] = []
        self.exchanges: list[int] = []  # answered, before each batch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name in HOOKS:
            setattr(trainer.strategy, name, self.watched(trainer.strategy, trainer.strategy, name))
        session = trainer.strategy.fit_session
        session.after_batch = self.watched(trainer.strategy, session, "after_batch")

    def watched(self, strategy: Any, owner: Any, name: str) -> Callable[..., Any]:
        hook = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            walk = self.batches[-1][name] = Walk(lambda: strategy.stats.steps, self.batch)
            with walk.recorded():
                return hook(*args, **kwargs)

        return watched

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch
        self.exchanges.append(trainer.strategy.stats.exchanges)
        self.batches.append({})
        if self.exchanges[-1] == 20:  # enough that one had no side visit, also on a loaded machine
            raise Enough


class Line(Regression):
    """One group of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1))


# ---------------------------------------------------------------------- what is seen


@dataclass
class Walk:
    """The frames that were entered, in order, and those of them that carried something."""

    steps: Callable[[], int]
    batch: Any
    entered: dict[str, None] = field(default_factory=dict)
    carrying: dict[str, None] = field(default_factory=dict)
    stepping: dict[str, None] = field(default_factory=dict)
    _open: list[tuple[FrameType, int]] = field(default_factory=list)  # and steps counted when it was entered

    @contextmanager
    def recorded(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(ROOT):
            return
        stack = list(_stack(frame))
        if not stack:
            return
        if event == "call":
            self.entered |= dict.fromkeys(stack[:1])
            self._open.append((frame, self.steps()))
            code = frame.f_code
            starred = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + starred]
            handed: Any = [frame.f_locals.get(name) for name in names]
        else:
            handed = argument
            entered, before = self._open.pop()
            assert entered is frame
            if self.steps() > before:
                self.stepping |= dict.fromkeys(stack)
        if self._is_cargo(handed, 3):
            self.carrying |= dict.fromkeys(stack)

    def _is_cargo(self, value: Any, depth: int) -> bool:
        if isinstance(value, Tensor):
            return not any(value is each for each in self.batch)
        if isinstance(value, Exchange | Reply):
            return True
        if isinstance(value, Future):
            return bool(value.done()) and isinstance(value.value(), Reply)
        if isinstance(value, list | tuple) and depth:
            return value is not self.batch and any(self._is_cargo(each, depth - 1) for each in value)
        return isinstance(value, dict) and depth > 0 and self._is_cargo(list(value.values()), depth - 1)


def _stack(frame: FrameType | None) -> Iterator[str]:
    """Our frames from here down to the hook, by name; none if there is Lightning in between."""
    found = []
    while frame is not None and frame.f_code.co_filename != __file__:
        code = frame.f_code
        if code.co_filename.startswith(LIGHTNING):
            return
        if code.co_filename.startswith(ROOT):
            room = code.co_filename.removeprefix(ROOT).removesuffix(".py")
            found.append(f"{room}: {code.co_qualname.partition('.<locals>.<')[0]}")
        frame = frame.f_back
    yield from found


# ---------------------------------------------------------------------- the numbers


def rooms(frames: Iterable[str]) -> set[str]:
    return {frame.partition(":")[0] for frame in frames}


def together(walks: Iterable[Walk]) -> tuple[dict[str, None], dict[str, None]]:
    """What several hooks entered, and what of it carried something."""
    entered: dict[str, None] = {}
    carrying: dict[str, None] = {}
    for walk in walks:
        entered |= walk.entered
        carrying |= walk.carrying
    return entered, carrying


def numbers(what: str, entered: dict[str, None], carrying: dict[str, None]) -> dict[str, int]:
    return {
        f"{what}: rooms that carry": len(rooms(carrying)),
        f"{what}: frames that carry": len(carrying),
        f"{what}: rooms entered": len(rooms(entered)),
    }


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Watcher:
    """What a fit's hooks walked through."""
    link, watch = Link(), Watcher()

    def begin(self: TrainingJob, *args: Any, **kwargs: Any) -> None:
        self.launches, self.address = self.launches + 1, ("127.0.0.1", 1)

    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")  # as if torchrun had started this process, as one of two
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(rank_variables.OWNER_ENV, '{"address": null, "variables": {}}')  # the fit writes its own
    monkeypatch.setattr(TrainingJob, "begin", begin)
    monkeypatch.setattr(TrainingJob, "connect", lambda self: link)
    with pytest.raises(Enough):
        trainer(tmp_path, ASGDStrategy(nsync=NSYNC), callbacks=[watch]).fit(Line(), loader(1000))
    link.close()
    return watch


@NEEDS_SHARED_MEMORY
@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames have no qualified names")
def test_the_way_of_an_update_becomes_no_longer(watch: Watcher) -> None:
    merged = [k for k, (before, after) in enumerate(itertools.pairwise(watch.exchanges)) if after > before]
    exchanges = [together(watch.batches[k + i]["on_train_batch_start"] for i in (-1, 0)) for k in merged]
    steps = [together(replace(w, carrying=w.stepping) for w in watch.batches[k + 1].values()) for k in merged[:-1]]
    # Leases are asked for by the clock: side visits differ a little from one exchange to the next.
    exchange, step = (min(walks, key=lambda walk: len(walk[0])) for walks in (exchanges, steps))
    found = numbers("exchange", *exchange) | numbers("step", *step)
    said = complaints(found, RECORDED, 0, "RECORDED", "in all")
    if not said:
        return
    for name, (entered, carrying) in {"an exchange": exchange, "a step": step}.items():
        said += [f"Frames of {name}; those with a star carry it:"]
        said += [f"  {'*' if frame in carrying else ' '} {frame}" for frame in entered]
    pytest.fail("\n".join(said))
