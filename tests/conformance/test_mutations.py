"""One rank skips, repeats or reorders a collective: all ranks end with an error that names it, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asgd import ASGDStrategy, Timeouts
from lightning_asgd.core.protocol import UntrainedState
from lightning_asgd.core.protocol.reductions import reduce
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.session_client import pickled
from tests.conformance.lab import Lab
from tests.conformance.pair import Outcome, Pair
from tests.helpers.holding import await_file

COLLECTIVE_S = 1.5  # where any error that names the mutation will do, a time-out too
STALLED_S = 5.0  # where a collective must not time out before the one that a rank does not call
DEADLINE_S = 60.0
NAMED = (
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ProtocolError: Worker 1 exchanged before the shard had weights",  # it skipped the barrier that guards them
)
CALLS: tuple[Callable[[Any], Any], ...] = (
    lambda strategy: strategy.barrier("mine"),
    lambda strategy: strategy.broadcast("word"),
    lambda strategy: strategy.reduce(torch.ones(2), reduce_op="sum"),
    lambda strategy: strategy.all_gather(torch.ones(2)),
)


def skip(calls: list[Any], k: int) -> list[Any]:
    return calls[:k] + calls[k + 1 :]


def repeat(calls: list[Any], k: int) -> list[Any]:
    return calls[: k + 1] + calls[k:]


def reorder(calls: list[Any], k: int) -> list[Any]:
    j = (k + 1) % len(calls)
    swapped = list(calls)
    swapped[k], swapped[j] = calls[j], calls[k]
    return swapped


def stall(calls: list[Any], k: int, until: Path) -> list[Any]:
    return [*calls[:k], lambda strategy: await_file(until, 25.0), *calls[k:]]


def strategy(collective_s: float) -> ASGDStrategy:
    return ASGDStrategy(nsync=4, timeouts=Timeouts(collective_s=collective_s))


def talk(
    lab: Lab, mutate: Callable[[list[Any], int], list[Any]], k: int, hook: str, collective_s: float = COLLECTIVE_S
) -> None:
    """Fit with a callback that makes all calls; rank 1's are mutated. Leaves a file at its end."""
    calls = list(CALLS) if lab.rank == 0 else mutate(list(CALLS), k)

    def speak(self: Any, trainer: Any, module: Any) -> None:
        for call in calls:
            call(trainer.strategy)

    talker = type("Talker", (lab.pl.Callback,), {hook: speak})()
    trainer = lab.trainer(strategy=strategy(collective_s), callbacks=[talker], max_epochs=1, limit_train_batches=4)
    try:
        trainer.fit(lab.regression(), lab.loader(), lab.loader(16))
    finally:
        (lab.folder / f"over{lab.rank}").touch()


def ends_with_a_named_error(pair: Pair, case: Any, folder: Path) -> list[Outcome]:
    outcomes = pair.run(case, folder, DEADLINE_S)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    assert any(error.startswith(NAMED) for error in errors), errors
    assert any("orker 1" in error or "orker 0" in error for error in errors), errors
    return outcomes


@pytest.mark.parametrize("k", range(len(CALLS)))
@pytest.mark.parametrize("mutate", [skip, repeat, reorder], ids=lambda f: f.__name__)
def test_a_mutated_callback(mutate: Any, k: int, pair: Pair, tmp_path: Path) -> None:
    hook = ("on_train_epoch_end", "on_validation_end", "on_fit_start", "on_train_start")[k]
    ends_with_a_named_error(pair, partial(talk, mutate=mutate, k=k, hook=hook), tmp_path)


def test_a_rank_that_does_not_come_is_named(pair: Pair, tmp_path: Path) -> None:
    mutate = partial(stall, until=tmp_path / "over0")  # rank 1 waits until rank 0 has given up
    case = partial(talk, mutate=mutate, k=2, hook="on_train_epoch_end", collective_s=STALLED_S)
    outcomes = ends_with_a_named_error(pair, case, tmp_path)
    assert "CollectiveTimeoutError: reduce 'sum'" in outcomes[0].error
    assert "worker 1 did not call it" in outcomes[0].error


def leave_early(lab: Lab, data: str) -> None:
    """Rank 1 trains an epoch less than rank 0."""
    own = ASGDStrategy(nsync=4, data=data, timeouts=Timeouts(collective_s=100.0))
    trainer = lab.trainer(strategy=own, max_epochs=2 - lab.rank, limit_train_batches=4)
    trainer.fit(lab.regression(), lab.loader())


@pytest.mark.parametrize("data", ["leases", pytest.param("split", marks=pytest.mark.slow)])
def test_a_rank_that_trains_fewer_epochs(data: str, pair: Pair, tmp_path: Path) -> None:
    outcomes = ends_with_a_named_error(pair, partial(leave_early, data=data), tmp_path)
    assert "Workers disagree about" in outcomes[0].error


def count_calls(lab: Lab) -> dict[str, int]:
    """How many collectives a fit makes."""
    seen = 0

    def counted(call: Callable[..., Any], self: Collectives, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += self.real
        return call(self, *args, **kwargs)

    with_collectives(counted, lambda: short_fit(lab, collective_s=100.0))
    return {"calls": seen}


def mutated_fit(lab: Lab, n: int, mutation: str) -> None:
    """Fit; rank 1 leaves out its n-th collective, makes it twice, or makes another one in its place."""
    seen = 0

    def mutated(call: Callable[..., Any], self: Collectives, kind: str, name: str, *given: Any, **about: Any) -> Any:
        nonlocal seen
        mine = self.real and lab.rank == 1 and seen == n
        seen += self.real
        payload, *how = given
        if mine and mutation == "skip":
            if isinstance(payload, UntrainedState):  # without the chief's buffers it would be called again
                payload = replace(payload, short={"plain": {}, "odd": pickled({})})
            payloads = dict.fromkeys(range(2), payload)
            return reduce(*how, payloads) if how else payloads
        if mine and mutation == "reorder":
            return call(self, "barrier", "another", None, *["given" for _ in how])
        answer = call(self, kind, name, *given, **about)
        return call(self, kind, name, *given, **about) if mine and mutation == "repeat" else answer

    with_collectives(mutated, lambda: short_fit(lab))


def with_collectives(changed: Callable[..., Any], fit: Callable[[], None]) -> None:
    """Fit while every collective, gathered or reduced, goes through a function that gets the original call first."""
    originals = {name: getattr(Collectives, name) for name in ("gather", "reduced")}
    for name, original in originals.items():
        setattr(Collectives, name, through(changed, original))
    try:
        fit()
    finally:
        for name, original in originals.items():
            setattr(Collectives, name, original)


def through(changed: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: changed(original, self, *args, **kwargs)


def short_fit(lab: Lab, collective_s: float = COLLECTIVE_S) -> None:
    trainer = lab.trainer(strategy=strategy(collective_s), max_epochs=1, limit_train_batches=4)
    trainer.fit(lab.regression(), lab.loader(), lab.loader(16))


@pytest.mark.parametrize("mutation", ["skip", pytest.param("repeat", marks=pytest.mark.slow), "reorder"])
def test_no_mutation_of_any_collective_of_a_fit_hangs(mutation: str, pair: Pair, tmp_path: Path) -> None:
    """Every collective of ours and Lightning's, one at a time. Only the very last ones can go unnoticed."""
    calls = pair.run(count_calls, tmp_path, DEADLINE_S)[1].facts["calls"]
    assert calls >= 10
    unnoticed = []
    for n in range(calls):
        outcomes = pair.run(partial(mutated_fit, n=n, mutation=mutation), tmp_path, DEADLINE_S)
        errors = [outcome.error for outcome in outcomes if outcome.error]
        if errors:
            # The rank that is told first leaves; the other one may hear of that instead.
            assert any(error.startswith(NAMED) for error in errors), errors
            assert all(error.startswith((*NAMED, "WorkerLostError")) for error in errors), errors
        else:
            unnoticed.append(n)
    assert all(n >= calls - 3 for n in unnoticed), (unnoticed, calls)
