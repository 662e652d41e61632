"""Streams: every sample is applied once, for shards of any length, and if workers or the coordinator are lost."""

from __future__ import annotations

import heapq
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.futures import Future

from lightning_asgd.core.foundation.errors import ProtocolError, WorkerAwayError
from lightning_asgd.core.foundation.ranges import without
from lightning_asgd.core.leases.client import DataLeases
from lightning_asgd.core.leases.plan import ReadingPlan
from lightning_asgd.core.leases.table import Leases
from lightning_asgd.core.protocol import UNKNOWN, Epoch, LeaseGrant, LeaseHoldings, LeaseRequest, OpenEpoch
from lightning_asgd.core.server.pending_replies import Completion
from lightning_asgd.core.worker.session_client import Members
from lightning_asgd.streams.parallel_reader import ParallelPlan, ParallelReader
from lightning_asgd.streams.server import StreamLeases
from lightning_asgd.streams.step_maker import MadeStep, StepMaker, StepOrder
from lightning_asgd.streams.stream_reader import StreamPlan, StreamReader

KEY = "fit/0"


@dataclass(frozen=True)
class Shards:
    """Samples are (shard, position). A shard tells its length, or not."""

    lengths: Sequence[int]
    known: bool = False

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(n if self.known else UNKNOWN for n in self.lengths))

    @property
    def all(self) -> Counter[tuple[int, int]]:
        return Counter((shard, i) for shard, length in enumerate(self.lengths) for i in range(length))

    def read(self, shard: int, start: int) -> Iterator[tuple[int, int]]:
        for i in range(start, self.lengths[shard]):
            yield shard, i


class Processes:
    """Stands for loader processes: each makes its steps when they are got."""

    def __init__(self, count: int, shards: Shards) -> None:
        self.count = count
        self.makers = [StepMaker(shards.read, shards.ends, list) for _ in range(count)]
        self.asked: list[deque[StepOrder]] = [deque() for _ in range(count)]

    def ask(self, process: int, order: StepOrder) -> None:
        self.asked[process].append(order)

    def get(self, process: int) -> MadeStep:
        return self.makers[process].make(self.asked[process].popleft())

    def close(self) -> None:
        for maker in self.makers:
            maker.close()


class Killed(BaseException):
    """A worker's process is gone."""


@dataclass
class Worker:
    number: int
    pace: float
    leases: DataLeases
    thread: threading.Thread | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    killed: bool = False
    away: bool = False
    applied: list[tuple[int, int]] = field(default_factory=list)
    unpushed: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0
    pushed: int = 0
    met: list[int] = field(default_factory=list)  # batches at each sync point
    batches: int = 0
    failed: BaseException | None = None
    voids: list[int] = field(default_factory=list)  # batches whose update was discarded
    sizes: list[int] = field(default_factory=list)  # of its batches


class Job:
    """One epoch in virtual time: every worker is a thread, and one of them runs at a time."""

    def __init__(
        self,
        shards: Shards,
        paces: Sequence[float],
        ends: Sequence[int] = (),
        *,
        batch: int = 4,
        accumulate: int = 1,
        push_every: int = 2,
        drop_last: bool = False,
        processes: int = 0,
        latency: float = 0.0,
    ) -> None:
        self.latency = latency  # seconds until a request reaches the server
        self.sent: list[tuple[int, Future[Any]]] = []  # requests that have not reached it
        self.processes = processes  # of each worker, which read the shards
        self.shards, self.batch, self.push_every = shards, batch, push_every
        units = shards.ends[-1]
        ends = (*(end for end in ends if end < units), units)
        self.epoch = Epoch(KEY, units, ends, b"", (), batch * accumulate, shards.ends)
        self.server = StreamLeases(self.epoch)
        self.restored = 0
        self.late_s = 0.0  # when the last worker begins
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.scheduled = 0
        self.waiting: dict[int, tuple[LeaseRequest, Future[Any]]] = {}
        self.main = threading.Semaphore(0)
        self.workers = [self._worker(number, pace, accumulate, drop_last) for number, pace in enumerate(paces)]
        self.server.update_members(range(len(paces)), 0.0)

    def _worker(self, number: int, pace: float, accumulate: int, drop_last: bool) -> Worker:
        connection = Connection(self, number)
        client = SimpleNamespace(connection=connection, members=[Members()])
        leases = DataLeases(lambda: client, rejoin=lambda: self._rejoin(number), clock=lambda: self.now)  # type: ignore[arg-type, return-value]
        leases.open(self._plan(accumulate, drop_last))
        return Worker(number, pace, leases)

    def _plan(self, accumulate: int, drop_last: bool) -> ReadingPlan:
        epoch, batch, ends = self.epoch, self.batch, self.shards.ends
        if not self.processes:
            reader = StreamReader(self.shards.read, ends)
            return StreamPlan(epoch, (), batch, accumulate, reader=reader, drop_last=drop_last)
        processes, ahead = Processes(self.processes, self.shards), 2 * self.processes + 1
        parallel = ParallelReader(processes, ends, ahead)
        return ParallelPlan(epoch, (), batch, accumulate, reader=parallel, ahead=ahead, drop_last=drop_last)

    # ---- time and turns

    def at(self, time: float, do: Callable[[], None]) -> None:
        self.scheduled += 1
        heapq.heappush(self.events, (time, self.scheduled, do))

    def give_turn(self, worker: Worker) -> None:
        if worker.thread is None or not worker.thread.is_alive():
            return  # its last request is answered
        worker.turn.release()
        assert self.main.acquire(timeout=60), f"worker {worker.number} takes no end"

    def hand_back(self, worker: Worker) -> None:
        self.main.release()
        worker.turn.acquire()
        if worker.killed:
            raise Killed

    def sleep(self, worker: Worker, seconds: float) -> None:
        until = self.now + seconds
        self.at(until, lambda: self.give_turn(worker))
        while self.now < until:
            self.hand_back(worker)

    def run(self) -> Job:
        for worker in self.workers:
            worker.thread = threading.Thread(target=self._train, args=(worker,), daemon=True)
            worker.thread.start()
            late = self.late_s if worker is self.workers[-1] else 0.0
            self.at(late, lambda w=worker: self.give_turn(w))  # type: ignore[misc]
        count = 0
        while self.events:
            self.now, _, do = heapq.heappop(self.events)
            do()
            count += 1
            assert count < 20_000, "it does not end"
        for worker in self.workers:
            if worker.thread is not None and worker.thread.is_alive() and not worker.killed:
                self.stop_all()
                raise AssertionError(f"worker {worker.number} waits for ever, at {self.now}")
        self.stop_all()
        for worker in self.workers:
            if worker.failed is not None:
                raise worker.failed
        return self

    def stop_all(self) -> None:
        for worker in self.workers:
            worker.killed = True
            worker.turn.release()
        for worker in self.workers:
            if worker.thread is not None:
                worker.thread.join(5)

    # ---- the training

    def _train(self, worker: Worker) -> None:
        worker.turn.acquire()
        try:
            if not worker.killed:
                self._epoch(worker)
        except Killed:
            pass
        except BaseException as error:
            worker.failed = error
        self.main.release()

    def _epoch(self, worker: Worker) -> None:
        leases = worker.leases
        batches: list[Any] = []
        while True:
            samples = leases.take()
            if samples is None:
                return  # Lightning's loop would end here
            leases.begin_batch()
            closes = leases.closes
            self.sleep(worker, worker.pace)
            worker.batches += 1
            batches += samples
            worker.sizes.append(len(samples))
            if closes:
                worker.steps += 1
            valid = leases.end_batch(worker.steps)
            if not valid:
                worker.voids.append(worker.batches)
                batches = []
                worker.unpushed = []
            elif closes:
                worker.unpushed += batches
                batches = []
            if closes and worker.steps % self.push_every == 0:
                self._push(worker)
            more = leases.more(worker.pushed)
            if not more:
                self._push(worker)
                more = leases.wait(worker.pushed)
            if not more:
                worker.met.append(worker.batches)
                if leases.last:
                    return
                leases.next_interval()

    def _push(self, worker: Worker) -> None:
        if worker.away:  # the update is refused
            self._rejoin(worker.number)
            worker.leases.revoke()
            worker.unpushed = []
            return
        worker.applied += worker.unpushed
        worker.unpushed = []
        worker.pushed = worker.steps
        self.server.applied(worker.number, worker.leases.trained[1])
        self._answer(self.server.retry(self.now))

    # ---- faults

    def kill(self, number: int) -> None:
        worker = self.workers[number]
        if worker.thread is not None and not worker.thread.is_alive():
            return
        worker.killed = True
        self.waiting.pop(number, None)
        living = [w.number for w in self.workers if not w.killed]
        self._answer(self.server.update_members(living, self.now))

    def fence(self, number: int) -> None:
        """It was silent: what it holds is granted to others, and it is told so."""
        if not self.workers[number].killed:
            self.workers[number].away = True
            self._answer(self.server.forget(number, self.now))

    def _rejoin(self, number: int) -> None:
        worker = self.workers[number]
        worker.away = False
        for sender, future in self.sent:
            if sender == number and not future.done():  # the worker waits for its answer before it rejoins
                future.set_exception(WorkerAwayError("away"))
        self._answer(self.server.forget(number, self.now))
        worker.unpushed = []
        worker.leases.revoke()

    def replace_server(self) -> None:
        """The coordinator is lost: another is made from the weights' units and what the workers report."""
        finished = self.server.finished
        self.server = StreamLeases(replace(self.epoch, done=finished))
        self.restored += 1
        living = [w for w in self.workers if not w.killed]
        parts: dict[int, LeaseHoldings] = {}
        for worker in living:
            part = worker.leases.part
            if part is not None and not worker.away:
                parts[worker.number] = part
                self.server.learn_ends(part.ended)
        for number, part in parts.items():
            self.server.reinstate(number, part)
        self.server.update_members([w.number for w in living], self.now)
        for number in list(self.waiting):
            _, future = self.waiting.pop(number)
            future.set_result(LeaseGrant())  # it is repeated, since the server was restored
            self.at(self.now, lambda w=self.workers[number]: self.give_turn(w))  # type: ignore[misc]

    # ---- the coordinator

    def post(self, request: LeaseRequest, future: Future[Any]) -> None:
        if self.latency:
            self.sent.append((request.worker, future))
            restored, worker = self.restored, self.workers[request.worker]
            self.at(self.now + self.latency, lambda: self.serve(request, future, restored, worker))
        else:
            self.serve(request, future, self.restored, None)

    def serve(self, request: LeaseRequest, future: Future[Any], restored: int, wakes: Worker | None) -> None:
        worker = self.workers[request.worker]
        self.sent = [each for each in self.sent if each[1] is not future]
        if worker.killed or future.done():
            return
        if worker.away:
            future.set_exception(WorkerAwayError("away"))
        elif restored != self.restored:
            future.set_result(LeaseGrant())  # it is repeated
        else:
            self.waiting[request.worker] = request, future
            self._answer(self.server.serve(replace(request, opens=None), self.now), request.worker)
        if wakes is not None and future.done():
            self.give_turn(wakes)

    def _answer(self, answers: Sequence[Completion], runs: int | None = None) -> None:
        for answered, grant in answers:
            request, future = self.waiting.pop(answered.worker, (None, None))
            if future is None or request is None:
                continue
            if isinstance(grant, BaseException):
                future.set_exception(grant)
            else:
                future.set_result(grant)
            if answered.worker != runs:
                self.at(self.now, lambda w=self.workers[answered.worker]: self.give_turn(w))  # type: ignore[misc]

    @property
    def applied(self) -> Counter[tuple[int, int]]:
        return Counter(sample for worker in self.workers for sample in worker.applied)


class Connection:
    """Of a worker to the coordinator."""

    world_size = 2

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.sender = ("s", number)

    @property
    def restored(self) -> tuple[int]:
        return (self.job.restored,)

    def ask(self, server: int, message: OpenEpoch) -> tuple[tuple[int, int], ...]:
        return self.job.server.finished

    def post(self, server: int, message: LeaseRequest, timeout_s: float | None) -> Future[Any]:
        future: Future[Any] = Future()
        self.job.post(message, future)
        return future

    def wait(self, future: Future[Any], seconds: float) -> bool:
        while not future.done():
            self.job.hand_back(self.job.workers[self.number])
        return True

    def result(self, server: int, future: Future[Any]) -> LeaseGrant:
        self.wait(future, 0.0)
        grant: LeaseGrant = future.wait()
        return grant


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=8)
PACES = st.lists(st.sampled_from([0.01, 0.05, 0.1, 0.3, 1.0]), min_size=1, max_size=4)
PROCESSES = st.sampled_from([0, 2])
ENDS = st.lists(st.integers(8, 150), max_size=3).map(lambda e: tuple(sorted(set(e))))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    known = draw(st.booleans())
    lengths = draw(LENGTHS)
    lengths = [max(1, n) for n in lengths] if known else lengths
    return Job(
        Shards(lengths, known),
        draw(PACES),
        draw(ENDS),
        accumulate=draw(st.integers(1, 3)),
        push_every=draw(st.integers(1, 4)),
        processes=draw(st.integers(0, 3)),
        latency=draw(st.sampled_from([0.0, 0.004])),
    )


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_every_sample_is_trained_once(job: Job) -> None:
    job.run()
    assert job.applied == job.shards.all
    total, reached = sum(job.shards.lengths), [end for end in job.epoch.ends if end < sum(job.shards.lengths)]
    if total:
        for worker in job.workers:
            # Here no worker waits for one whose units were returned; where they validate together, they do.
            if not (job.processes and worker.voids):
                assert len(worker.met) >= len(reached), "every worker meets the others at every sync point"
            assert worker.leases.reached in (total, *job.epoch.ends)


@settings(max_examples=300, deadline=None)
@given(jobs(), st.lists(st.tuples(st.sampled_from(["kill", "fence", "server"]), st.integers(0, 3), st.floats(0, 8))))
def test_every_sample_is_trained_once_whoever_is_lost(job: Job, faults: list[tuple[str, int, float]]) -> None:
    killed: set[int] = set()
    for fault, number, time in sorted(faults, key=lambda f: f[2]):
        number %= len(job.workers)
        if fault == "kill" and len(killed | {number}) < len(job.workers):
            killed.add(number)
            job.at(time, lambda n=number: job.kill(n))  # type: ignore[misc]
        elif fault == "fence":
            job.at(time, lambda n=number: job.fence(n))  # type: ignore[misc]
        elif fault == "server":
            job.at(time, job.replace_server)
    job.run()
    assert job.applied == job.shards.all


def test_a_killed_worker_whose_shard_others_finish() -> None:
    job = Job(Shards((10, 10, 9, 11, 2, 4, 5)), [1, 0.05, 0.1, 0.1], (32,), batch=4, accumulate=3)
    job.at(0.8926, lambda: job.kill(1))
    assert job.run().applied == job.shards.all


@settings(max_examples=100, deadline=None)
@given(LENGTHS, PACES, ENDS, PROCESSES)
def test_where_batches_must_be_full_no_other_is_trained(
    lengths: list[int], paces: list[float], ends: Any, processes: int
) -> None:
    job = Job(Shards(lengths), paces, ends, drop_last=True, processes=processes).run()
    assert not job.applied - job.shards.all
    left_out = sum((job.shards.all - job.applied).values())
    assert left_out < 4 * len(paces) * len(job.epoch.ends)
    assert sum(job.applied.values()) % 4 == 0
    assert max(job.applied.values(), default=1) == 1


@settings(max_examples=100, deadline=None)
@given(LENGTHS, PACES, st.integers(1, 3), PROCESSES)
def test_batches_are_full_until_the_data_end(
    lengths: list[int], paces: list[float], every: int, processes: int
) -> None:
    """Whatever ends within a batch: a shard, or a sync interval. Some modules cannot train a batch of one sample."""
    step = 4 * len(paces) * every
    ends = range(step, sum(lengths), step)
    job = Job(Shards(lengths), paces, ends, processes=processes).run()
    assert job.applied == job.shards.all
    smaller = [size for worker in job.workers for size in worker.sizes if size < 4]
    assert len(smaller) <= 2 * len(paces)  # one at the end of the data, and one whose update is discarded


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.booleans(), st.integers(2, 4))
def test_a_late_worker_gets_a_full_batch_of_every_interval(lengths: list[int], known: bool, workers: int) -> None:
    """Workers that complete a step, since a shard has ended within it, do not use what is kept for it."""
    interval = 4 * workers * 2
    lengths = [*lengths, -sum(lengths) % interval or interval, interval]  # the last one has no interval's end
    intervals = sum(lengths) // interval - 1
    job = Job(Shards(lengths, known), [0.01] * workers, range(interval, sum(lengths), interval))
    job.late_s = 5.0
    job.run()
    assert job.applied == job.shards.all
    late = job.workers[-1]
    assert len(set(late.met[:intervals])) == intervals
    assert set(late.sizes[: late.met[intervals - 1]]) == {4}
    assert not [batch for batch in late.voids if batch <= late.met[intervals - 1]]


@pytest.mark.parametrize("processes", [0, 2])
def test_a_slow_worker_costs_nothing(processes: int) -> None:
    """A fast worker trains the last samples of a shard that a slow worker is reading."""
    fast, slow = 0.02, 0.4
    lengths = (4000, 4000, 2000)
    job = Job(Shards(lengths), [fast, slow], push_every=10, processes=processes).run()
    assert job.applied == job.shards.all
    ideal = sum(lengths) / 4 / (1 / fast + 1 / slow)
    assert job.now < 1.05 * ideal
    assert len(job.workers[1].applied) > 0.8 * ideal / slow * 4


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_workers_finish_together_though_the_length_of_shards_is_unknown(processes: int) -> None:
    for paces in ([0.0105, 0.11], [0.01, 0.012, 0.011, 0.06], [0.01] * 4):
        job = Job(Shards([800] * 10), paces, push_every=5, batch=8, processes=processes).run()
        assert job.now < 1.005 * 1000 / sum(1 / pace for pace in paces)


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("latency", [0.0, 0.003])
def test_a_small_rest_is_trained_with_the_step_before(processes: int, latency: float) -> None:
    """Batch norm cannot train a batch of one sample. It stays possible: a worker may be lost, or find the end late."""
    small = 0
    for seed in range(40):
        draw = random.Random(seed)
        lengths = [draw.randint(30, 60) for _ in range(draw.randint(4, 10))]
        paces = [draw.choice([0.01, 0.012, 0.05, 0.1]) * draw.uniform(1, 1.1) for _ in range(draw.choice([2, 4]))]
        job = Job(Shards(lengths), paces, push_every=5, batch=8, processes=processes, latency=latency).run()
        assert job.applied == job.shards.all
        small += any(size < 4 for worker in job.workers for size in worker.sizes)
    assert small <= 2


@dataclass(frozen=True)
class Stated(Shards):
    """Shards that have other lengths than they say."""

    stated: Sequence[int] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.stated))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("actual", [(11, 10), (10, 11), (9, 10), (11, 12)])
def test_what_a_shard_has_beyond_its_stated_length_is_left_out(
    actual: tuple[int, int], processes: int, workers: int
) -> None:
    job = Job(Stated(actual, True, (10, 10)), [0.1] * workers, processes=processes).run()
    assert job.applied == Shards([min(n, 10) for n in actual]).all


def test_a_fenced_worker_may_report_an_end_that_it_found_before() -> None:
    job = Job(Shards((53,)), [0.0637, 0.0981], (81,), processes=1, push_every=10)
    job.at(0.1268, lambda: job.fence(1))
    assert job.run().applied == job.shards.all


def test_the_steps_of_an_epoch_may_become_smaller() -> None:
    job = Job(Shards((106,)), [0.05], (96,), accumulate=8, processes=1)
    job.at(0.01, lambda: job.workers[0].leases.accumulate(1))
    assert job.run().applied == job.shards.all


def test_a_worker_that_waits_counts_as_free_after_the_coordinator_was_replaced() -> None:
    paces = [0.0227, 0.0132, 0.0184, 0.0209]
    for lost_s in (0.16, 0.17, 0.1792, 0.185):
        job = Job(Shards([51, 28, 32, 32, 8]), paces, (29, 57), processes=2, latency=0.004)
        job.at(lost_s, job.replace_server)
        assert job.run().applied == job.shards.all


@pytest.mark.parametrize("slow", [0.015, 0.02, 0.035])
@pytest.mark.parametrize("processes", [0, 2])
def test_a_slower_worker_does_not_take_the_last_step_of_an_interval(processes: int, slow: float) -> None:
    paces = [0.01, slow]
    job = Job(Shards([4000] * 2), paces, range(200, 8000, 200), push_every=5, processes=processes).run()
    assert job.now < 1.03 * 2000 / sum(1 / pace for pace in paces)


@pytest.mark.parametrize("processes", [0, 3])
def test_a_shard_is_read_by_one_process_until_no_other_is_left(processes: int) -> None:
    reads: Counter[int] = Counter()

    @dataclass(frozen=True)
    class Counted(Shards):
        def read(self, shard: int, start: int) -> Iterator[tuple[int, int]]:
            reads[shard] += 1
            return super().read(shard, start)

    job = Job(Counted([100] * 36), [0.1, 0.15, 0.2], processes=processes).run()
    assert job.applied == job.shards.all
    assert sorted(reads) == list(range(36))
    shared = 3 * max(1, processes)  # near the end, when there are fewer shards than readers
    assert sorted(reads.values())[:-shared] == [1] * (36 - shared)


def test_a_worker_may_end_only_a_shard_that_it_reads() -> None:
    epoch = Epoch(KEY, 2 * UNKNOWN, (2 * UNKNOWN,), b"", (), 4, (UNKNOWN, 2 * UNKNOWN))
    leases = StreamLeases(epoch)
    leases.update_members((0, 1), 0.0)
    (first,) = leases.serve(LeaseRequest("s", 0, KEY, 0, 0, 0, 0.0, size=4), 0.0)
    assert first.reply.ranges == ((0, 4),)
    for number in (UNKNOWN + 3, -1, 2 * UNKNOWN):
        with pytest.raises(ProtocolError, match="shard"):
            leases.serve(LeaseRequest("s", 0, KEY, 0, 0, 0, 0.0, size=4, ended=(number,)), 0.0)
    (second,) = leases.serve(LeaseRequest("s", 0, KEY, 0, 0, 0, 0.0, size=4, ended=(3,)), 0.0)
    assert second.reply.ranges[0][0] == UNKNOWN, "the first shard has ended"
    leases.serve(LeaseRequest("s", 0, KEY, 0, 3, 3, 0.0, size=4, ended=(3,)), 0.0)  # a repeated call changes nothing
    assert leases.finished == ((0, 3),)


def test_processes_are_granted_steps_in_turn_and_what_is_returned_is_granted_again() -> None:
    leases = StreamLeases(Epoch(KEY, 3 * UNKNOWN, (3 * UNKNOWN,), b"", (), 4, (UNKNOWN, 2 * UNKNOWN, 3 * UNKNOWN)))
    leases.update_members((0,), 0.0)

    def granted(**options: Any) -> tuple[tuple[int, int], ...]:
        (answer,) = leases.serve(LeaseRequest("s", 0, KEY, 0, 0, 0, 0.1, rtt_s=2.0, size=4, **options), 0.0)
        ranges: tuple[tuple[int, int], ...] = answer.reply.ranges
        return ranges

    first = granted(places=(-1, -1))
    assert first[:4] == ((0, 4), (UNKNOWN, UNKNOWN + 4), (4, 8), (UNKNOWN + 4, UNKNOWN + 8))
    held = {first_ // UNKNOWN: last for first_, last in first}
    # The first shard has six samples: what lies beyond is gone, and the two last are to be in a full step.
    (again, *others) = granted(ended=(6,), returned=((4, 6),), places=(4, held[1]))
    assert again == (4, 6)
    assert others[0] == (2 * UNKNOWN, 2 * UNKNOWN + 2), "the step is completed from a shard that is not read"


def test_what_is_given_back_is_read_again_in_its_place() -> None:
    maker = StepMaker(lambda shard, start: iter(range(start, 21)), (1000,), list)
    assert maker.make(StepOrder(((10, 12), (20, 22)), (4,))).ended == (21,)
    assert maker.make(StepOrder(((19, 21),), (2,))).batches == [[19, 20]]
    assert maker.make(StepOrder(((10, 12),), (2,))).batches == [[10, 11]]


def test_an_epoch_without_shards_has_no_ends_of_shards() -> None:
    leases = Leases(Epoch(KEY, 8, (8,)))
    leases.update_members((0,), 0.0)
    with pytest.raises(ProtocolError, match="has none"):
        leases.serve(LeaseRequest("s", 0, KEY, 0, 0, 0, 0.0, ended=(3,)), 0.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=5), st.integers(0, 40), st.integers(0, 20))
def test_without_removes_what_lies_in_a_range(pieces: list[tuple[int, int]], first: int, length: int) -> None:
    ranges = [(a, a + n) for a, n in pieces]
    left = without(ranges, first, first + length)
    assert [n for a, b in left for n in range(a, b)] == [
        n for a, b in ranges for n in range(a, b) if not first <= n < first + length
    ]
