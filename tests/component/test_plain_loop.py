"""A plain loop with servers in this process: every sample is trained once, whatever a worker does."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_asgd import Advanced, AsyncSGD
from lightning_asgd.algorithms import LocalSGD, WarmStart
from lightning_asgd.core.foundation import process_name
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, ServerLostError
from lightning_asgd.core.foundation.process_name import machine_and_pid, this_process
from lightning_asgd.core.job.interruptions import Interruptions
from lightning_asgd.core.protocol import Exchange
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shell import Shell
from lightning_asgd.elastic.elastic_run import ElasticFleet
from lightning_asgd.loops import member as loop_member
from tests.helpers.algorithms import SUM_OF_ROUND
from tests.helpers.cluster import run_workers
from tests.helpers.plain import Counts, Run, Shards, numbered

SAMPLES = 60
EPOCHS = 3
LENGTHS = (20, 1, 13, 0, 26)  # of shards


@pytest.fixture
def elastic() -> Iterator[Run]:
    made = Run()
    yield made
    made.close()


def counting(elastic: Run, **options: Any) -> tuple[Counts, torch.optim.Optimizer, AsyncSGD]:
    model = Counts(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, elastic.worker(model, optimizer, **options)


def step(model: Counts, optimizer: torch.optim.Optimizer, numbers: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(numbers).backward()
    optimizer.step()


def train_a_pass(asgd: AsyncSGD, model: Counts, optimizer: torch.optim.Optimizer) -> None:
    with asgd:
        for (numbers,) in asgd.batches(numbered(SAMPLES), batch_size=3):
            step(model, optimizer, numbers)


def test_workers_with_batches_of_different_sizes_train_every_sample_once_per_epoch(elastic: Run) -> None:
    sizes: list[list[int]] = [[], []]
    data, both = numbered(SAMPLES), threading.Barrier(2)

    def work(rank: int) -> list[float]:
        model, optimizer, asgd = counting(elastic)
        with asgd:
            both.wait(10.0)
            for _ in asgd.epochs(EPOCHS):
                for (numbers,) in asgd.batches(data, batch_size=(3, 7)[rank]):
                    time.sleep(0.002)
                    step(model, optimizer, numbers)
                    sizes[rank].append(len(numbers))
            assert asgd.epoch == EPOCHS
        return model.seen.tolist()

    assert run_workers(2, work) == [[float(EPOCHS)] * SAMPLES] * 2
    assert [max(each) for each in sizes] == [3, 7]
    assert sum(sizes[0]) + sum(sizes[1]) >= EPOCHS * SAMPLES
    assert min(map(sum, sizes)) >= 7


@pytest.mark.parametrize("leaves", ["break", "raise", "interrupt"])
def test_what_a_worker_has_not_trained_others_train_however_it_leaves(elastic: Run, leaves: str) -> None:
    data, gone = numbered(SAMPLES), threading.Event()

    def leave() -> None:
        if leaves != "break":
            raise {"raise": KeyError("no such sample"), "interrupt": KeyboardInterrupt()}[leaves]

    def work(rank: int) -> list[float]:
        model, optimizer, asgd = counting(elastic)
        try:
            with asgd:
                for _ in asgd.epochs(EPOCHS if rank == 0 else 1):
                    for batch, (numbers,) in enumerate(asgd.batches(data, batch_size=3)):
                        step(model, optimizer, numbers)
                        if rank == 0 and batch == 3:
                            gone.wait(10.0)
                        if rank == 1 and batch == 2:
                            leave()
                            break
        except (KeyError, KeyboardInterrupt):
            assert leaves != "break"
        if rank == 1:
            gone.set()
        return model.seen.tolist()

    assert run_workers(2, work)[0] == [float(EPOCHS)] * SAMPLES


@pytest.mark.parametrize("signals", [1, 2])
def test_what_an_interrupted_exchange_has_lost_is_trained_again(
    elastic: Run, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    call, exchanges = elastic.transport.call, itertools.count()

    def interrupted(server: int, message: Any, timeout_s: float) -> Any:
        if isinstance(message, Exchange) and message.push and next(exchanges) == 2:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
        return call(server, message, timeout_s)

    monkeypatch.setattr(elastic.transport, "call", interrupted)
    model, optimizer, asgd = counting(elastic)
    with pytest.raises(SystemExit):
        train_a_pass(asgd, model, optimizer)
    assert 0 < model.seen.sum() < SAMPLES
    model, optimizer, asgd = counting(elastic)
    train_a_pass(asgd, model, optimizer)
    assert model.seen.tolist() == [1.0] * SAMPLES


def test_a_sigterm_that_follows_slurms_signal_does_not_cut_the_last_push(
    elastic: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sends it to a job that is requeued, which a worker asks for before it leaves."""
    call, order = elastic.transport.call, list[str]()

    def interrupted(server: int, message: Any, timeout_s: float) -> Any:
        if "requeue" in order and isinstance(message, Exchange) and message.push:
            order.append("push")
            os.kill(os.getpid(), signal.SIGTERM)
        return call(server, message, timeout_s)

    monkeypatch.setenv("SLURM_JOB_ID", "80")
    monkeypatch.setattr(loop_member, "requeue_job", lambda: order.append("requeue"))
    monkeypatch.setattr(elastic.transport, "call", interrupted)
    model, optimizer, asgd = counting(elastic, nsync=100)

    def train() -> None:
        with asgd:
            for batch, (numbers,) in enumerate(asgd.batches(numbered(SAMPLES), batch_size=5)):
                if batch == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
                    os.kill(os.getpid(), signal.SIGTERM)
                step(model, optimizer, numbers)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 128 + signal.SIGUSR1
    assert order == ["requeue", "push"]
    latest = elastic.services[0].state.epochs.latest
    assert latest is not None
    assert latest.finished == ((0, 4 * 5),)


@pytest.mark.parametrize(
    ("signals", "raised"),
    [
        (("USR1", "TERM", "TERM"), SystemExit),
        (("USR1", "INT"), KeyboardInterrupt),
        (("TERM", "leave", "TERM", "TERM"), SystemExit),
        (("TERM", "leave", "INT"), KeyboardInterrupt),
    ],
)
def test_only_one_sigterm_is_ignored(
    signals: tuple[str, ...], raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "80")
    interruptions = Interruptions()
    try:
        interruptions.defers = True
        for name in signals[:-1]:
            if name == "leave":
                with pytest.raises(SystemExit):
                    interruptions.raise_now()
                interruptions.leave()
            else:
                os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
        with pytest.raises(raised):
            os.kill(os.getpid(), signal.Signals[f"SIG{signals[-1]}"])
    finally:
        interruptions.close()


def test_a_look_for_a_signal_that_has_not_come_changes_nothing() -> None:
    shell = Shell()
    interruptions = shell.interruptions = Interruptions()
    try:
        interruptions.defers = True
        shell.raise_signal()
        os.kill(os.getpid(), signal.SIGINT)  # in the middle of a batch
        with pytest.raises(KeyboardInterrupt):
            shell.raise_signal()
    finally:
        interruptions.close()


@pytest.mark.parametrize("kind", ["run", "job"])
def test_slurms_signal_ends_a_worker_between_two_batches_and_only_a_run_is_requeued(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol, requests = tmp_path / "scontrol", tmp_path / "requests"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {requests}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "80")
    servers = Run(elastic=kind == "run")
    model = Counts(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    asgd = (servers.worker if kind == "run" else servers.alone)(model, optimizer)
    saved: dict[str, Any] = {}

    def train() -> None:
        with asgd:
            try:
                for batch, (numbers,) in enumerate(asgd.batches(numbered(SAMPLES), batch_size=5)):
                    if batch == 3:
                        os.kill(os.getpid(), signal.SIGUSR1)
                        os.kill(os.getpid(), signal.SIGTERM)  # as SLURM does once the job is requeued
                    step(model, optimizer, numbers)
            except SystemExit:
                saved.update(asgd.state_dict())
                raise

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 128 + signal.SIGUSR1
    assert saved["model"]["seen"].sum() == 4 * 5
    assert sum(last - first for first, last in saved["data"]["done"]) == 4 * 5
    asked = requests.read_text() if requests.exists() else ""
    assert asked == ("requeue 80\n" if kind == "run" else "")
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    servers.close()


def test_a_batch_that_was_left_before_its_step_is_trained_again(elastic: Run) -> None:
    model, optimizer, asgd = counting(elastic)
    with asgd:
        for (numbers,) in asgd.batches(numbered(SAMPLES), batch_size=6):
            if asgd.progress > 0.3:
                break
            step(model, optimizer, numbers)
        trained = model.seen.sum().item()
        assert 0 < trained < SAMPLES
        asgd.sync()
        assert model.seen.sum().item() == trained
        latest = elastic.services[0].state.epochs.latest
        assert latest is not None
        assert latest.finished == ((0, trained),)


def test_a_worker_that_joins_later_continues_where_the_others_are(elastic: Run) -> None:
    def made() -> tuple[Counts, torch.optim.Optimizer, Any, AsyncSGD]:
        model = Counts(SAMPLES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return model, optimizer, schedule, elastic.worker(model, optimizer, schedulers=schedule)

    (model, optimizer, schedule, first), (late, _, theirs, second) = made(), made()
    with first:
        for _ in first.epochs(2):
            for (numbers,) in first.batches(numbered(SAMPLES), batch_size=4):
                step(model, optimizer, numbers)
            schedule.step()
        assert (first.epoch, first.is_chief) == (2, True)
        with second:
            assert (second.epoch, second.progress, second.is_chief) == (2, 2.0, False)
            assert late.seen.tolist() == model.seen.tolist() == [1.5] * SAMPLES
            assert theirs.get_last_lr() == schedule.get_last_lr() == [0.25]
            assert list(second.epochs(2)) == []


def test_a_worker_that_is_started_again_reports_that_its_predecessor_is_dead(elastic: Run) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (_, _, lost), (_, _, again), (_, _, third) = (counting(elastic) for _ in range(3))
    members = lambda: elastic.services[0].state.session.members  # type: ignore[union-attr]  # noqa: E731
    mine = this_process()
    process_name._names[0] = machine_and_pid(dead.pid) + mine.split("/")[-1]
    try:
        lost.__enter__()
        lost._member.membership._stop()  # type: ignore[union-attr]
        lost._interruptions.close()  # type: ignore[union-attr]
    finally:
        process_name._names[0] = mine
    assert members().living == {1}
    with again:
        assert members().living == {2}
        assert members().left[1].startswith("its process has ended")
        with third:
            assert members().living == {2, 3}


def test_dead_workers_that_had_joined_at_once_are_both_reported(elastic: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    members = lambda: elastic.services[0].state.session.members  # type: ignore[union-attr]  # noqa: E731
    note, both = SessionClient.note, threading.Barrier(2)

    def at_once(client: SessionClient, name: str, value: Any = None, **more: Any) -> Any:
        known = note(client, name, value, **more)
        if name == "processes" and value is None:
            both.wait(10.0)
        return known

    def lose(_: int) -> None:
        asgd = counting(elastic)[2]
        asgd.__enter__()
        asgd._member.membership._stop()  # type: ignore[union-attr]
        asgd._interruptions.close()  # type: ignore[union-attr]

    _, _, first = counting(elastic)
    with first:
        other, mine = subprocess.Popen(["sleep", "60"]), this_process()
        process_name._names[0] = machine_and_pid(other.pid) + mine.split("/")[-1]
        monkeypatch.setattr(SessionClient, "note", at_once)
        try:
            run_workers(2, lose)
        finally:
            process_name._names[0] = mine
            monkeypatch.undo()
        assert members().living == {1, 2, 3}
        other.kill()
        other.wait()
        with counting(elastic)[2]:
            assert members().living == {1, 4}


def test_a_plain_loop_cannot_join_what_a_trainer_has_begun(elastic: Run) -> None:
    _, _, first = counting(elastic)
    _, _, second = counting(elastic)
    with first:
        assert first._member is not None
        assert first._member.membership is not None
        first._member.membership.client.note("loop", "a Trainer")
        with (
            pytest.raises(ConfigurationError, match=r"^Run 's' was begun with a Trainer, but .* Expected"),
            second,
        ):
            pass
        assert elastic.services[0].state.session.members.living == {1}  # type: ignore[union-attr]


def test_a_worker_begins_the_run_of_one_that_died_while_it_published(
    elastic: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = SessionClient.note

    def dies(client: SessionClient, name: str, value: Any = None, **more: Any) -> Any:
        if name == "layout":
            raise ServerLostError("This worker dies.")
        return note(client, name, "a Trainer" if name == "loop" else value, **more)

    monkeypatch.setattr(SessionClient, "note", dies)
    _, _, dead = counting(elastic)
    dead._loaded = {
        "epoch": 3,
        "passes": 3,
        "data": {},
        "finished": [],
        "versions": [0],
        "servers": (),
        "algorithm": "ASGD",
    }
    with pytest.raises(ServerLostError), dead:
        pass
    monkeypatch.undo()
    model, optimizer, asgd = counting(elastic)
    with asgd, counting(elastic)[2] as late:
        assert (asgd.epoch, late.epoch) == (0, 0)
        for (numbers,) in asgd.batches(numbered(SAMPLES), batch_size=3):
            step(model, optimizer, numbers)
    assert model.seen.tolist() == [1.0] * SAMPLES


def test_a_worker_joins_although_it_cannot_report_dead_ones(elastic: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> None:
        raise ServerLostError("Server 0 is lost.")

    monkeypatch.setattr(ElasticFleet, "_report_dead", lost)
    model, optimizer, asgd = counting(elastic)
    train_a_pass(asgd, model, optimizer)
    assert model.seen.tolist() == [1.0] * SAMPLES


def test_training_continues_from_a_checkpoint_of_the_middle_of_an_epoch(elastic: Run) -> None:
    data = DataLoader(numbered(SAMPLES), batch_size=4)
    model, optimizer, asgd = counting(elastic)
    state: dict[str, Any] = {}
    with asgd:
        for _ in asgd.epochs(2):
            for batch, (numbers,) in enumerate(asgd.batches(data)):
                step(model, optimizer, numbers)
                if asgd.epoch == 1 and batch == 4:
                    kept = asgd.state_dict()
                    state = {**kept, "model": {name: each.clone() for name, each in kept["model"].items()}}
    assert state["model"]["seen"].sum() == SAMPLES + 5 * 4
    assert (state["epoch"], state["passes"]) == (1, 1)
    other = Run()
    model, optimizer, asgd = counting(other)
    asgd.load_state_dict(state)
    with asgd:
        assert asgd.epoch == 1
        for _ in asgd.epochs(EPOCHS):
            for (numbers,) in asgd.batches(data):
                step(model, optimizer, numbers)
    assert model.seen.tolist() == [float(EPOCHS)] * SAMPLES
    other.close()


@pytest.mark.parametrize("passes", [1, 2])
def test_an_epoch_whose_passes_are_over_is_not_trained_again(elastic: Run, passes: int) -> None:
    first, second = (DataLoader(numbered(SAMPLES), batch_size=size) for size in (4, 5))
    model, optimizer, asgd = counting(elastic)
    state: dict[str, Any] = {}
    with asgd:
        for _ in asgd.epochs(2):
            for number, data in enumerate((first, second), start=1):
                for (numbers,) in asgd.batches(data):
                    step(model, optimizer, numbers)
                if asgd.epoch == 1 and number == passes:
                    kept = asgd.state_dict()
                    state = {**kept, "model": {name: each.clone() for name, each in kept["model"].items()}}
    other, found = Run(), []
    model, optimizer, asgd = counting(other)
    asgd.load_state_dict(state)
    with asgd:
        for epoch in asgd.epochs(EPOCHS):
            for number, data in enumerate((first, second), start=1):
                for (numbers,) in asgd.batches(data):
                    step(model, optimizer, numbers)
                    found.append((epoch, number))
    assert model.seen.tolist() == [2.0 * EPOCHS] * SAMPLES
    assert sorted(set(found)) == [(1, 2), (2, 1), (2, 2)][passes - 1 :]
    other.close()


def test_a_checkpoint_within_a_later_pass_of_an_epoch(elastic: Run) -> None:
    """The pass before it is over; of the present one only the rest is left to be trained."""
    first, second = (DataLoader(numbered(SAMPLES), batch_size=size) for size in (4, 5))
    model, optimizer, asgd = counting(elastic)
    state: dict[str, Any] = {}
    with asgd:
        for _ in asgd.epochs(1):
            for data in (first, second, first):
                for number, (numbers,) in enumerate(asgd.batches(data)):
                    step(model, optimizer, numbers)
                    if data is second and number == 5:
                        kept = asgd.state_dict()
                        state = {**kept, "model": {name: each.clone() for name, each in kept["model"].items()}}
    trained = state["model"]["seen"].sum()
    assert SAMPLES < trained < 2 * SAMPLES
    other, batches = Run(), 0
    model, optimizer, asgd = counting(other)
    asgd.load_state_dict(state)
    with asgd:
        for _ in asgd.epochs(1):
            for data in (first, second, first):
                for (numbers,) in asgd.batches(data):
                    step(model, optimizer, numbers)
                    batches += len(numbers)
    assert batches == 3 * SAMPLES - trained
    assert model.seen.tolist() == [3.0] * SAMPLES
    other.close()


def test_steps_of_several_batches_count_once(elastic: Run) -> None:
    model, optimizer, asgd = counting(elastic)
    with asgd:
        for _ in asgd.epochs(2):
            for number, (numbers,) in enumerate(asgd.batches(numbered(SAMPLES), batch_size=5, accumulate=3), start=1):
                model(numbers).backward()
                if number % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        assert asgd.stats.steps == 2 * SAMPLES // 15
    assert model.seen.tolist() == [2.0] * SAMPLES


def test_a_step_that_a_scaler_skips_does_not_count(elastic: Run) -> None:
    model, optimizer, asgd = counting(elastic)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with asgd:
        for number, (numbers,) in enumerate(asgd.batches(numbered(SAMPLES), batch_size=10)):
            optimizer.zero_grad()
            scaler.scale(model(numbers) * (float("inf") if number == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert asgd.stats.steps == SAMPLES // 10 - 1
    assert model.seen.sum() == SAMPLES - 10


def test_one_worker_trains_the_bits_of_a_loop_without_the_package() -> None:
    job = Run(elastic=False)
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :1] * 2 - inputs[:, 1:2])

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(2)
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        model = nn.Sequential(*layers)
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    plain, optimizer = made()
    for _ in range(EPOCHS):
        train(plain, optimizer, DataLoader(data, batch_size=8))
    model, optimizer = made()
    with job.alone(model, optimizer, algorithm="asgd") as asgd:
        for _ in asgd.epochs(EPOCHS):
            train(model, optimizer, asgd.batches(data, batch_size=8))
        assert asgd.stats.exchanges > 10
    for mine, theirs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    job.close()


def test_loader_processes_make_the_batches(elastic: Run) -> None:
    model, optimizer, asgd = counting(elastic)
    with asgd:
        for _ in asgd.epochs(2):
            batches = asgd.batches(numbered(SAMPLES), batch_size=6, num_workers=2, persistent_workers=True)
            assert len(batches) == 10
            for (numbers,) in batches:
                step(model, optimizer, numbers)
    assert model.seen.tolist() == [2.0] * SAMPLES


def test_samplers_of_the_programs_own(elastic: Run) -> None:
    data = numbered(SAMPLES)
    shuffled = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    ready = [list(range(first, first + 12)) for first in range(0, SAMPLES, 12)]
    model, optimizer, asgd = counting(elastic)
    with asgd:
        for loader in (DataLoader(data, 7, sampler=shuffled, drop_last=True), DataLoader(data, batch_sampler=ready)):
            for (numbers,) in asgd.batches(loader):
                step(model, optimizer, numbers)
        assert asgd.epoch == 2
    assert model.seen.sum() == SAMPLES // 7 * 7 + SAMPLES


def test_a_program_with_data_of_its_own_exchanges_after_its_steps(elastic: Run) -> None:
    def work(rank: int) -> list[float]:
        model, optimizer, asgd = counting(elastic)
        with asgd:
            both.wait(10.0)  # else one may join when the other is past its epoch
            for _ in asgd.epochs(1):
                for number in range(rank, SAMPLES, 2):
                    step(model, optimizer, torch.tensor([number]))
            assert asgd.stats.exchanges >= 10
            both.wait(10.0)
            asgd.sync()
            both.wait(10.0)
        return model.seen.tolist()

    both = threading.Barrier(2)
    assert run_workers(2, work) == [[1.0] * SAMPLES] * 2


def test_weights_change_after_the_last_step_of_a_round_whatever_the_order_of_the_list(elastic: Run) -> None:
    both = threading.Barrier(2)

    def work(rank: int) -> int:
        gan = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 1)})
        g, d = (torch.optim.SGD(gan[name].parameters(), lr=0.1) for name in "gd")
        with elastic.worker(gan, [g, d], nsync=1) as asgd:
            for _ in range(5):
                both.wait(10.0)
                fake, before = gan["g"](torch.ones(3, 2)), [each.clone() for each in gan["g"].parameters()]
                d.zero_grad()
                gan["d"](fake.detach()).sum().backward()
                d.step()
                assert all(map(torch.equal, before, gan["g"].parameters()))  # the graph of `fake` is alive
                g.zero_grad()
                gan["d"](fake).sum().backward()
                g.step()
            return asgd.stats.exchanges

    assert min(run_workers(2, work)) >= 4


def test_a_skipped_step_closes_a_round_too(elastic: Run) -> None:
    modules = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    a, b = (torch.optim.SGD(each.parameters(), lr=0.1, fused=True) for each in modules)
    pushed = []
    with elastic.worker(modules, [a, b], nsync=1) as asgd:
        for number in range(4):
            for module, optimizer in zip(modules, (a, b), strict=True):
                optimizer.zero_grad()
                module(torch.ones(1, 1)).sum().backward()
                if optimizer is b and number > 1:
                    b.found_inf = torch.ones(())  # as of a GradScaler whose optimizer skips steps itself
                optimizer.step()
            pushed.append(asgd.stats.bytes_pushed)
        assert asgd.stats.steps == 6
    assert pushed == sorted(set(pushed))


def test_stop_ends_training_with_the_epoch(elastic: Run) -> None:
    _, _, asgd = counting(elastic)
    with asgd:
        for epoch in asgd.epochs(100):
            if epoch == 1:
                asgd.stop()
        assert asgd.epoch == 2


class Unlike(Shards):
    """Samples that cannot be pickled."""

    def open_shard(self, epoch: int, shard: int, start: int) -> Iterator[Any]:
        return iter([lambda: 0])


class Backwards(BatchSampler):
    """A batch sampler of the program's own, around a sampler that divides the samples among workers."""

    def __iter__(self) -> Iterator[list[int]]:
        return reversed(list(super().__iter__()))


def test_samplers_that_divide_the_samples_among_workers(elastic: Run) -> None:
    model, optimizer, asgd = counting(elastic)
    data = numbered(SAMPLES)
    batches = Backwards(DistributedSampler(data, num_replicas=2, rank=0), 4, drop_last=False)
    orders: list[list[int]] = []
    with asgd:
        for _ in range(2):
            orders.append([])
            for (numbers,) in asgd.batches(DataLoader(data, batch_sampler=batches)):
                step(model, optimizer, numbers)
                orders[-1] += numbers.tolist()
    assert model.seen.tolist() == [2.0] * SAMPLES
    assert orders[0] != orders[1]


class Unseeded(Sampler[int]):
    """Yields another order whenever it is asked, of these samples."""

    def __init__(self, samples: range = range(SAMPLES)) -> None:
        self.samples, self.own = samples, random.Random()

    def __iter__(self) -> Iterator[int]:
        return iter(self.own.sample(self.samples, len(self.samples)))

    def __len__(self) -> int:
        return len(self.samples)


def train_passes(asgd: AsyncSGD, model: Counts, optimizer: torch.optim.Optimizer, sampler: Sampler[int]) -> None:
    for _ in asgd.epochs(EPOCHS):
        for (numbers,) in asgd.batches(DataLoader(numbered(SAMPLES), 3, sampler=sampler)):
            time.sleep(0.002)
            step(model, optimizer, numbers)


def test_who_joins_a_run_takes_the_order_of_who_began_the_epoch(elastic: Run, caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()

    def work(rank: int) -> list[float]:
        model, optimizer, asgd = counting(elastic)
        if rank:
            begun.wait(10.0)
        with asgd:
            begun.set()
            train_passes(asgd, model, optimizer, Unseeded())
        return model.seen.tolist()

    assert run_workers(2, work) == [[float(EPOCHS)] * SAMPLES] * 2
    assert 1 <= caplog.text.count("The order of Unseeded differs between workers. This worker shares that of") <= 2
    notes = elastic.services[0].state.registry.metadata
    assert len([name for name in notes if name.startswith("order ")]) == EPOCHS + min(EPOCHS, 4)


def test_who_has_none_of_the_samples_of_a_run_is_told_so(elastic: Run) -> None:
    half = SAMPLES // 2
    model, optimizer, asgd = counting(elastic)
    with asgd:
        batches = iter(asgd.batches(DataLoader(numbered(SAMPLES), 3, sampler=Unseeded(range(half)))))
        next(batches)

        def join() -> None:
            late, its_optimizer, joined = counting(elastic)
            with joined:
                train_passes(joined, late, its_optimizer, Unseeded(range(half, SAMPLES)))

        with pytest.raises(ConfigurationError, match="Unseeded gives each worker samples that the others do not get"):
            join()
        for (numbers,) in batches:
            step(model, optimizer, numbers)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_what_cannot_be_done_is_refused_by_name(elastic: Run) -> None:
    model, optimizer, asgd = counting(elastic)
    with pytest.raises(ASGDError, match=r"^This AsyncSGD is not in use\. Expected "):
        asgd.sync()
    with asgd:
        with pytest.raises(ConfigurationError, match=r"given a Endless, .* has no open_shard\(.*Expected"):
            asgd.batches(Endless())
        with pytest.raises(ConfigurationError, match=r"given a Endless, .* has no open_shard\(.*Expected"):
            asgd.batches(Endless(), shuffle=True)
        with pytest.raises(
            ConfigurationError, match=r"^batches\(Shards, shuffle\) was called\. Expected none of shuffle,"
        ):
            asgd.batches(Shards(LENGTHS, known=True), shuffle=True)
        with pytest.raises(ConfigurationError, match=r"given a int, which has no samples by number"):
            asgd.batches(3, shuffle=True)
        with pytest.raises(ConfigurationError, match=r"given a int, which has no samples by number"):
            asgd.batches(3)
        with pytest.raises(ConfigurationError, match=r"given a Unlike whose samples cannot be pickled"):
            asgd.batches(Unlike(LENGTHS, known=True))
        with pytest.raises(ConfigurationError, match=r"Expected a data set with arguments of DataLoader, or"):
            asgd.batches(DataLoader(numbered(3)), batch_size=2)
        with pytest.raises(ConfigurationError, match=r"batch_size=None\. Expected a torch DataLoader"):
            asgd.batches(DataLoader(numbered(3), batch_size=None))
        for accumulate in (0, "2", 1.5):
            with pytest.raises(ConfigurationError, match=rf"^accumulate={accumulate!r}\. Expected"):
                asgd.batches(numbered(3), accumulate=accumulate)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"without a batch\. Expected"):
            list(asgd.batches(numbered(3), batch_size=5, drop_last=True))
        with pytest.raises(ASGDError, match=r"in use already\. Expected"), asgd:
            pass
        with pytest.raises(ASGDError, match=r"within the with block\. Expected"):
            asgd.load_state_dict({})
    for wrong, text in (
        ({"algorithm": "local_sgd", "nsync": "restarted"}, "nsync='restarted' was given with run="),
        ({"algorithm": LocalSGD(transforms=[WarmStart(1)])}, "LocalSGD was given with run="),
        ({"nsync": 0}, "nsync=0"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            elastic.worker(model, optimizer, **wrong)
    with pytest.raises(ConfigurationError, match=r"without total_steps\. Expected total_steps=\.\.\., the number of"):
        AsyncSGD(model, optimizer, algorithm="local_sgd", nsync="restarted")
    with pytest.raises(ConfigurationError, match=r"^total_steps=9 was given without nsync='restarted'\."):
        AsyncSGD(model, optimizer, total_steps=9)
    with pytest.raises(ConfigurationError, match=r"^Advanced.units='words'\. Expected 'samples'"):
        AsyncSGD(model, optimizer, advanced=Advanced(units="words"))
    with pytest.raises(ConfigurationError, match=r"^AsyncSGD was given the optimizer int\. Expected torch"):
        elastic.worker(model, 3)
    with pytest.raises(ConfigurationError, match=r"^AsyncSGD was given no optimizer\. Expected at least one"):
        elastic.worker(model, [])
    with pytest.raises(ConfigurationError, match=r"^AsyncSGD was given int\. Expected a torch\.nn\.Module"):
        elastic.worker(3, optimizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("own", [True, False])
def test_steps_of_an_optimizer_that_was_not_given_are_reported(
    elastic: Run, own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, asgd = counting(elastic)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    with asgd:
        for stepping, expected in ((optimizer, False), (other, True), (optimizer, False)):
            caplog.clear()
            for (numbers,) in DataLoader(numbered(6), 2) if own else asgd.batches(numbered(6), batch_size=2):
                step(model, stepping, numbers)
            asgd.sync()
            assert ("none of the optimizers that it exchanges for has taken a step" in caplog.text) == expected


def test_what_would_not_be_exchanged_is_refused(elastic: Run) -> None:
    model, other = Counts(3), nn.Linear(2, 1)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    with (
        pytest.raises(ConfigurationError, match=r"^SGD trains 2 parameters that are not .*\(1, 2\).*ModuleDict"),
        elastic.worker(model, both),
    ):
        pass
    with pytest.raises(ConfigurationError, match=r"^AsyncSGD was given the scheduler int\. Expected one of torch's"):
        elastic.worker(model, torch.optim.SGD(model.parameters(), lr=1.0), schedulers=5)


@pytest.mark.parametrize("how", ["both", "after its epoch"])
def test_a_pass_that_another_one_has_ended_is_not_continued(elastic: Run, how: str) -> None:
    model, optimizer, asgd = counting(elastic)

    def train() -> None:
        first, second = (asgd.batches(numbered(SAMPLES), batch_size=3) for _ in range(2))
        if how == "both":
            for (numbers,), _ in zip(first, second, strict=True):
                step(model, optimizer, numbers)
        batches = iter(first)
        for _ in asgd.epochs(2):
            step(model, optimizer, *next(batches))

    with asgd, pytest.raises(ConfigurationError, match=r"^A pass over batches\(\) was continued after .*StackDataset"):
        train()


def test_a_run_refuses_parameters_that_are_unfrozen(elastic: Run) -> None:
    model = nn.ModuleList([Counts(SAMPLES), Counts(SAMPLES)])
    model[1].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    asgd = elastic.worker(model, optimizer)

    def train() -> None:
        for _ in asgd.epochs(2):
            for (numbers,) in asgd.batches(numbered(SAMPLES), batch_size=3):
                optimizer.zero_grad()
                model[0](numbers).backward()
                optimizer.step()
            model[1].requires_grad_(requires_grad=True)

    with (
        pytest.raises(ConfigurationError, match=r"parameters unfrozen, during training in an elastic run\. Expected"),
        asgd,
    ):
        train()


def test_a_job_has_one_worker_in_a_process() -> None:
    jobs, model = (Run(elastic=False), Run(elastic=False)), Counts(3)
    first, second = (job.alone(model, torch.optim.SGD(model.parameters(), lr=1.0)) for job in jobs)
    with first:
        with pytest.raises(ASGDError, match=r"^Another AsyncSGD of this process is in use .*ModuleDict"), second:
            pass
        first.sync()
    with second:
        second.sync()
    for job in jobs:
        job.close()


# ---------------------------------------------------------------------- data with shards


def test_batches_are_counted_in_units(elastic: Run) -> None:
    batches: list[float] = []
    call = elastic.transport.call

    def seen(server: int, message: Any, timeout_s: float) -> Any:
        if isinstance(message, Exchange) and message.push:
            batches.append(message.batch)
        return call(server, message, timeout_s)

    elastic.transport.call = seen  # type: ignore[method-assign]
    model, optimizer, asgd = counting(
        elastic, advanced=Advanced(units=lambda batch: batch[0].sum(), max_offline_steps=1), nsync=1
    )
    with asgd:
        for (numbers,) in asgd.batches(numbered(6), batch_size=2):
            with pytest.raises(ConfigurationError, match=r"^count_batch\(\) was called within a pass over batches"):
                asgd.count_batch([numbers])
            step(model, optimizer, numbers)
        assert batches == [1.0, 5.0, 9.0]
        asgd.count_batch([torch.tensor([4])])
        step(model, optimizer, torch.tensor([4]))
        asgd.sync()
        assert batches[3:] == [4.0]


def test_a_batch_of_the_programs_own_that_is_not_counted_is_named(elastic: Run) -> None:
    model, optimizer, asgd = counting(elastic, advanced=Advanced(units="samples"))
    with (
        pytest.raises(ConfigurationError, match=r"^Advanced.units='samples' was given, .*count_batch\(batch\) before"),
        asgd,
    ):
        step(model, optimizer, torch.tensor([4]))


def test_in_rounds_too_workers_of_an_elastic_run_train_every_sample_once_per_epoch(elastic: Run) -> None:
    both = threading.Barrier(2)

    def work(rank: int) -> list[float]:
        model, optimizer, asgd = counting(elastic, algorithm=SUM_OF_ROUND)
        with asgd:
            both.wait(10.0)
            for _ in asgd.epochs(EPOCHS - rank):  # the second one leaves before the last epoch
                for (numbers,) in asgd.batches(numbered(SAMPLES), batch_size=3):
                    step(model, optimizer, numbers)
        return model.seen.round().tolist()

    first, _ = run_workers(2, work)
    assert set(first) == {float(EPOCHS)}


@pytest.mark.parametrize("rule", ["layerwise", "local_sgd"])
def test_workers_that_wait_for_each_other_need_data_of_their_own(rule: str) -> None:
    job, model = Run(elastic=False), Counts(3)
    asgd = job.alone(model, torch.optim.SGD(model.parameters(), lr=1.0), algorithm=rule)
    with pytest.raises(ConfigurationError, match=r"^batches\(\) was called with L.*Expected a dataloader of"), asgd:
        list(asgd.batches(numbered(3)))
    job.close()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("processes", [0, 2])
def test_workers_share_the_shards_of_a_stream(elastic: Run, known: bool, processes: int) -> None:
    both, most = threading.Barrier(2), threading.Event()
    data = Shards(LENGTHS, known=known)

    def work(rank: int) -> list[float]:
        model, optimizer, asgd = counting(elastic)
        with asgd:
            both.wait(20.0)
            for epoch in asgd.epochs(EPOCHS):
                trained = 0
                for (numbers,) in asgd.batches(data, batch_size=(3, 4)[rank], num_workers=processes):
                    if rank == 1 and epoch == 0:
                        most.wait(20.0)  # slower than the other worker
                    assert known or asgd.progress == epoch
                    step(model, optimizer, numbers)
                    trained += len(numbers)
                    if rank == 0 and trained > SAMPLES / 2:
                        most.set()
            assert asgd.epoch == EPOCHS
        return model.seen.tolist()

    assert run_workers(2, work) == [[float(EPOCHS)] * SAMPLES] * 2
    assert most.is_set()


@pytest.mark.parametrize("leaves", ["break", "raise", "interrupt"])
def test_the_samples_of_a_worker_that_leaves_a_stream_are_trained_by_others(elastic: Run, leaves: str) -> None:
    def work(rank: int) -> list[float]:
        model, optimizer, asgd = counting(elastic)
        try:
            with asgd:
                for _ in asgd.epochs(EPOCHS if rank == 0 else 1):
                    for batch, (numbers,) in enumerate(asgd.batches(Shards(LENGTHS, known=False), batch_size=3)):
                        step(model, optimizer, numbers)
                        if rank == 0 and batch == 3:
                            gone.wait(10.0)
                        if rank == 1 and batch == 0:
                            if leaves != "break":
                                raise {"raise": KeyError("no such sample"), "interrupt": KeyboardInterrupt()}[leaves]
                            break
        except (KeyError, KeyboardInterrupt):
            assert leaves != "break"
        if rank == 1:
            gone.set()
        return model.seen.tolist()

    gone = threading.Event()
    assert run_workers(2, work)[0] == [float(EPOCHS)] * SAMPLES


@pytest.mark.parametrize("known", [True, False])
def test_training_continues_within_a_stream(elastic: Run, known: bool) -> None:
    model, optimizer, asgd = counting(elastic)
    state: dict[str, Any] = {}
    with asgd:
        for _ in asgd.epochs(2):
            for batch, (numbers,) in enumerate(asgd.batches(Shards(LENGTHS, known=known), batch_size=4)):
                step(model, optimizer, numbers)
                if asgd.epoch == 1 and batch == 6:
                    kept = asgd.state_dict()
                    state = {**kept, "model": {name: each.clone() for name, each in kept["model"].items()}}
    assert state["model"]["seen"].sum() == SAMPLES + 7 * 4
    other = Run()
    model, optimizer, asgd = counting(other)
    asgd.load_state_dict(state)
    with asgd:
        for _ in asgd.epochs(EPOCHS):
            for (numbers,) in asgd.batches(Shards(LENGTHS, known=known), batch_size=4):
                step(model, optimizer, numbers)
    assert model.seen.tolist() == [float(EPOCHS)] * SAMPLES
    other.close()


def test_the_length_and_the_rest_of_a_stream(elastic: Run) -> None:
    model, optimizer, asgd = counting(elastic)
    with asgd:
        assert len(asgd.batches(Shards(LENGTHS, known=True), batch_size=7)) == 9  # type: ignore[arg-type]
        batches = asgd.batches(DataLoader(Shards(LENGTHS, known=True), batch_size=7, drop_last=True))
        assert len(batches) == 8  # type: ignore[arg-type]
        for (numbers,) in batches:
            assert len(numbers) == 7
            step(model, optimizer, numbers)
        with pytest.raises(TypeError, match="unknown lengths have no len"):
            len(asgd.batches(Shards(LENGTHS, known=False), batch_size=7))  # type: ignore[arg-type]
    assert model.seen.sum() == 8 * 7
