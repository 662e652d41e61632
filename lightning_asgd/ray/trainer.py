"""The driver of a run on a Ray cluster: it hosts the rendezvous, and has Ray place servers and workers."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train import Result, RunConfig, ScalingConfig
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.foundation.errors import ASGDError, ConfigurationError, LaunchError
from lightning_asgd.core.foundation.validation import whole
from lightning_asgd.core.job import registry
from lightning_asgd.core.job import secret as job_secret
from lightning_asgd.core.job.facts import publish_facts
from lightning_asgd.core.job.interruptions import Interruptions
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.ray.actors import FINISHED, RunAddress, ServerActor, WorkerActor, end_process, first_key
from lightning_asgd.ray.reports import Storage
from lightning_asgd.ray.run_members import RunBoard, RunPlan, RunServer, RunWorker, actor_options

log = logging.getLogger(__name__)

_POLL_S = 0.5
_PATIENCE_S = 5.0  # for the cluster, before the program is asked to wait; for processes to begin to end
_START_S = 120.0  # at least, for servers to start once they have their place
_STOP_S = 30.0  # for a worker to leave the run in good order
_END_S = 600.0  # for the other workers to end after the first one has finished the run
_SHORT_S, _SHORT_LIVES = 60.0, 5  # a worker whose processes die so soon, so often in a row, is given up


class ASGDTrainer:
    """Trains with asynchronous SGD on a Ray cluster, in the form of Ray Train's ``TorchTrainer``.

    Every worker is an actor that runs the training function, in which a Lightning ``Trainer`` with
    ``strategy=ASGDStrategy(...)`` and one device joins the run by itself. Servers are actors on different nodes. What
    dies, alone or with its node, Ray starts again while the others train; no acknowledged update is lost as long as one
    worker lives. Workers may be added and removed: between ``num_workers=(least, most)``, as the cluster has room, and
    with :meth:`ASGDRun.scale`. Tensors do not pass through Ray.

    Args:
        train_loop_per_worker: the training function, with a configuration or without an argument.
        train_loop_config: the configuration.
        scaling_config: Ray Train's: ``num_workers``, ``use_gpu``, ``resources_per_worker``, ``accelerator_type``,
            ``placement_strategy``.
        run_config: Ray Train's: ``name``, ``storage_path``, ``storage_filesystem``, ``checkpoint_config``,
            ``worker_runtime_env``.
        num_servers: processes that share the weights equally.
        resources_per_server: what Ray reserves for each; ``{"CPU": 1}`` if not given.
        max_restarts: how often Ray starts each worker and each server again; -1 for as often as needed.
        transport: as for :class:`~lightning_asgd.ASGDStrategy`. ``"auto"`` is ``"zmq"`` where pyzmq is installed, with
            a secret that the run makes and passes on through Ray, unless ``LIGHTNING_ASGD_SECRET`` is set.
        place_s: seconds to wait until the cluster has room for the servers and the first workers; as long again, but at
            least 120 s, until the servers serve. For a replacement the run waits as long as Ray tries to start it.

    Raises:
        ConfigurationError: an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        num_servers: int = 1,
        resources_per_server: dict[str, float] | None = None,
        max_restarts: int = 100,
        transport: str = "auto",
        place_s: float = 300.0,
    ) -> None:
        takes = len(inspect.signature(train_loop_per_worker).parameters)
        self._plan = RunPlan(
            function=train_loop_per_worker,
            arguments=(train_loop_config or {},) if takes else (),
            scaling=scaling_config or ScalingConfig(),
            run=run_config or RunConfig(),
            num_servers=whole("num_servers", num_servers),
            resources_per_server=dict(resources_per_server or {"CPU": 1}),
            max_restarts=max_restarts,
            transport=transport,
            place_s=place_s,
        )
        self._plan.check()

    def fit(self) -> Any:
        """Train until the training function has ended. Returns Ray Train's ``Result``.

        Raises a :class:`LaunchError` as :meth:`start` does, an :class:`ASGDError` if no worker has finished.
        """
        run = self.start()
        interruptions = Interruptions(replaces="ray._private.worker")  # whose handlers Ray's core has replaced in C
        try:
            interruptions.defers = True
            while not (run._ended.wait(_POLL_S) or interruptions.came):
                pass
            interruptions.raise_now()
            return run.result()
        except BaseException:  # Ctrl-C, for instance: nothing else could end the run
            run.stop()
            raise
        finally:
            interruptions.close()

    def start(self) -> ASGDRun:
        """Start servers and workers, and return once the servers serve and the first workers have their places.

        Raises a :class:`LaunchError` if the cluster has no room, or a server cannot start.
        """
        return ASGDRun(self._plan)


class ASGDRun:
    """A run that :meth:`ASGDTrainer.start` has started."""

    def __init__(self, plan: RunPlan) -> None:
        _check_driver()
        self._plan, self._lock = plan, threading.Lock()
        self._workers: dict[int, RunWorker] = {}
        self._endings: list[Any] = []  # of the processes of workers that have ended training
        self._target, self._number = plan.most, 0
        self._failures: dict[int, BaseException] = {}
        self._finished = self._stopped = self._over = False
        self._forgiven = 0  # failures before the number of workers was changed
        self._starts: dict[int, int] = {}  # of each worker's processes
        self._error: BaseException | None = None
        self._groups: list[Any] = []
        self._servers: list[RunServer] = []
        self._rendezvous: Rendezvous | None = None
        self._storage = Storage.of(str(plan.run.storage_path), plan.run.name, plan.run.storage_filesystem)
        self._board = RunBoard(plan, self._storage)
        self._ended = threading.Event()  # a thread whose join() a signal has interrupted counts as ended
        try:
            self._address, self._rendezvous = self._host()
            places = self._places()
            self._start_servers(places[0], self._rendezvous)
            for index in range(plan.least):
                self._add_worker(index)
        except BaseException:
            self._close()
            raise
        threading.Thread(target=self._watch, name="lightning_asgd.ray", daemon=True).start()
        atexit.register(self._end_with_program)  # runs before Ray's own, which was registered before

    # ------------------------------------------------------------------ for the program

    @property
    def num_workers(self) -> int:
        """Workers that run, wait for room or are being started again, without those that were asked to end."""
        with self._lock:
            return sum(worker.stop_at is None for worker in self._workers.values())

    def scale(self, workers: int) -> None:
        """Change the number of workers. New ones start as the cluster has room; the newest leave first.

        Raises a :class:`ConfigurationError` for a number that ``ScalingConfig(num_workers=(least, most))`` excludes.
        """
        plan = self._plan
        if not plan.least <= workers <= plan.most:
            raise ConfigurationError(
                f"scale({workers}). Expected {plan.least} to {plan.most}, as ScalingConfig(num_workers="
                f"{plan.scaling.num_workers!r}) says."
            )
        with self._lock:
            if self._has_ray:
                self._target, self._forgiven = workers, len(self._failures)
                self._adjust()

    def stop(self) -> None:
        """End the run: every worker leaves it in good order. :meth:`result` returns what was reported until then."""
        with self._lock:
            if self._has_ray:
                self._stopped = True
                for worker in self._workers.values():
                    self._end_worker(worker)

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the run's end, for ``timeout_s`` seconds or as long as it takes. Returns Ray Train's ``Result``.

        Raises:
            TimeoutError: the run has not ended by then; it continues.
            ASGDError: no worker has finished; its ``__cause__`` is the first worker's exception.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"Run {self._plan.run.name!r} has not ended within {timeout_s:g} s.")
        if self._error is not None:
            raise self._error
        return self._result

    # ------------------------------------------------------------------ starting

    def _host(self) -> tuple[RunAddress, Rendezvous]:
        """Host the rendezvous in this process."""
        asked, host, run = self._plan.transport, get_node_ip_address(), self._plan.run.name
        secret = job_secret.given() or secrets.token_hex(32)
        before = os.environ.get(SECRET_ENV)
        os.environ[SECRET_ENV] = secret
        try:
            name, why, who = registry.choose(asked, one_machine=False)
            kind = registry.kind_of(name)
            kind.check_available()
            kind.provide_secret(one_machine=False)
            rendezvous = kind.host_rendezvous(host, 0)
        finally:
            os.environ.pop(SECRET_ENV, None)
            if before is not None:
                os.environ[SECRET_ENV] = before
        if kind.encrypted and secret != before:
            why = "as given" if asked == name else "pyzmq is installed"
            who = "is encrypted and authenticated (key generated for this run)."
        (log.info if kind.encrypted else log.warning)("Run %r: transport %s (%s) %s", run, name, why, who)
        return RunAddress(host, rendezvous.address[1], run, name, secret), rendezvous

    def _places(self) -> list[Any]:
        """Reserve room for the servers, on different nodes if possible, and for the first workers."""
        plan = self._plan
        wanted = [plan.resources_per_server] * plan.num_servers, [plan.resources_per_worker] * plan.least
        ways = "SPREAD", plan.scaling.placement_strategy
        self._groups = [placement_group(bundles, strategy=way) for bundles, way in zip(wanted, ways, strict=True)]
        for group, bundles in zip(self._groups, wanted, strict=True):
            each = bundles[0]
            if group.wait(min(_PATIENCE_S, plan.place_s)):
                continue
            room = (
                f"room for {len(bundles)} times {each}. It has {_shown(ray.cluster_resources(), each)}, of which "
                f"{_shown(ray.available_resources(), each)} are free."
            )
            log.warning("Waiting up to %g s until the cluster has %s", plan.place_s, room)
            if not group.wait(plan.place_s):
                raise LaunchError(
                    f"Within {plan.place_s:g} s the cluster had no {room} Ask for less in scaling_config or "
                    "resources_per_server, add nodes, or raise place_s."
                )
        return self._groups

    def _start_servers(self, places: Any, rendezvous: Rendezvous) -> None:
        plan = self._plan
        for index in range(plan.num_servers):
            at = PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=index)
            options = actor_options(plan.resources_per_server, plan.max_restarts, at) | self._environment
            actor = ray.remote(ServerActor).options(**options).remote(index, self._address)
            self._servers.append(RunServer(index, actor))
        keys, rendezvous.longer, wait_s = [], "raise place_s of ASGDTrainer", max(_START_S, plan.place_s)
        for index, server in enumerate(self._servers):
            keys.append(rendezvous.get(first_key(index), f"Server {index}", wait_s, server.check, kind=str))
            rendezvous.server(index, keys[-1], wait_s, check=server.check)
        publish_facts(rendezvous)
        rendezvous.announce_run(self._address.run_id, self._address.transport, keys, tended=True)

    def _add_worker(self, place: int | None) -> None:
        """Start a worker in one of the run's own places, or where the cluster has room."""
        plan, number = self._plan, self._number
        self._number += 1
        at: Any = "DEFAULT"
        if place is not None:
            at = PlacementGroupSchedulingStrategy(self._groups[1], placement_group_bundle_index=place)
        options = actor_options(plan.resources_per_worker, plan.max_restarts, at)
        actor = ray.remote(WorkerActor).options(**options, **self._environment).remote(number, self._address)
        ended = actor.train.remote(plan.function, plan.arguments, self._storage, self._board.actor)
        self._workers[number] = RunWorker(number, actor, ended, place)

    # ------------------------------------------------------------------ watching

    def _adjust(self) -> None:
        """Start or stop workers, to have as many as wanted."""
        alive = [worker for worker in self._workers.values() if worker.stop_at is None]
        for worker in alive[self._target :]:
            self._end_worker(worker)
        if not (self._finished or self._stopped):
            for _ in range(self._target - len(alive) - (len(self._failures) - self._forgiven)):
                taken = {worker.place for worker in self._workers.values()}
                self._add_worker(next((place for place in range(self._plan.least) if place not in taken), None))

    def _end_worker(self, worker: RunWorker) -> None:
        """Ask a worker to leave the run. It is killed if that takes long."""
        if worker.stop_at is not None:
            return
        worker.stop_at = time.monotonic() + _STOP_S
        self._board.ask("stop", worker.number)
        place = self._board.ask("places").get(worker.number)
        if place is None:  # it has not begun
            worker.stop_at = time.monotonic()
            return
        node, *process = place
        at = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": 0, "scheduling_strategy": at, "max_retries": 0, **self._environment}
        ray.remote(end_process).options(**options).remote(*process)

    @property
    def _environment(self) -> dict[str, Any]:
        given = self._plan.run.worker_runtime_env
        return {"runtime_env": given} if given else {}

    def _watch(self) -> None:
        try:
            while self._workers and self._has_ray:
                with self._lock:
                    self._adjust()
                    refs = [worker.ended for worker in self._workers.values()]
                ended, _ = ray.wait(refs, num_returns=len(refs), timeout=_POLL_S)
                with self._lock:
                    if self._has_ray:
                        self._look(ended)
            if not self._has_ray:
                raise ASGDError("Ray was shut down while the run trained.")
            self._result = self._collect()
        except BaseException as error:
            self._error = error
        finally:
            self._close()
            self._ended.set()

    @property
    def _has_ray(self) -> bool:
        """Whether Ray may be called. After its end, or the program's, a call would start another cluster."""
        return not self._over and ray.is_initialized()

    def _end_with_program(self) -> None:
        """Have the run's thread call Ray no more: the program ends, and Ray shuts down."""
        self._over = True
        self._ended.wait(_PATIENCE_S)

    def _look(self, ended: list[Any]) -> None:
        """Take note of what has ended, and end what is not to continue."""
        for server in self._servers:
            server.check()
        self._note_starts()
        for worker in [each for each in self._workers.values() if each.ended in ended]:
            self._note_end(worker)
        for worker in [*self._workers.values()]:
            if worker.stop_at is not None and time.monotonic() > worker.stop_at:
                if worker.number in self._starts:
                    log.warning("Worker %d did not end in time. It is killed.", worker.number)
                self._remove(worker)
        with_room = [w for w in self._workers.values() if w.number in self._starts or w.place is not None]
        if self._failures and not with_room:
            for worker in [*self._workers.values()]:  # these wait for room, and all that had some have failed
                self._remove(worker)

    def _note_starts(self) -> None:
        """Report processes that Ray has started again. A worker that always dies soon is given up."""
        for number, times in self._board.ask("begun").items():
            if len(times) > self._starts.get(number, 1):
                log.warning("Worker %d has died. It was started again.", number)
            self._starts[number] = len(times)
            latest, worker = times[-_SHORT_LIVES:], self._workers.get(number)
            lives = [after - before for before, after in itertools.pairwise(latest)]
            if worker is not None and worker.stop_at is None and len(latest) == _SHORT_LIVES and max(lives) < _SHORT_S:
                text = f"Worker {number} was started {len(times)} times and died each time within {max(lives):.0f} s."
                self._failures[number] = LaunchError(f"{text} Expected it to train. Look at its output.")
                log.warning(text)
                self._remove(worker)

    def _note_end(self, worker: RunWorker) -> None:
        """A worker's training function has ended, or its process cannot be started again."""
        try:
            how = ray.get(worker.ended)
        except RayError as error:
            if worker.stop_at is None:
                self._failures[worker.number] = error
                log.warning("Worker %d has failed; the others continue: %s", worker.number, error)
        else:
            if how == FINISHED and not self._finished:
                self._finished = True
                self._board.ask("end")
                now = time.monotonic()
                for other in self._workers.values():
                    until = now + _END_S if other.number in self._starts else now
                    other.stop_at = until if other.stop_at is None else min(until, other.stop_at)
        del self._workers[worker.number]
        self._endings.append(worker.actor.end.options(max_task_retries=0).remote())

    def _remove(self, worker: RunWorker) -> None:
        ray.kill(worker.actor, no_restart=True)
        del self._workers[worker.number]

    def _collect(self) -> Any:
        """The result, from what the workers have reported."""
        import pandas

        if not (self._finished or self._stopped):
            first = next(iter(self._failures.values()), None)
            raise ASGDError(
                f"No worker of the run {self._plan.run.name!r} has finished: {len(self._failures)} have failed. The "
                f"first failure: {first}"
            ) from first
        reports = self._board.ask("reports")
        kept = [(self._storage.checkpoint(name), metrics) for metrics, name in reports if name is not None]
        return Result(
            metrics=reports[-1][0] if reports else None,
            checkpoint=kept[-1][0] if kept else None,
            error=None,
            path=self._storage.path,
            metrics_dataframe=pandas.DataFrame([metrics for metrics, _ in reports]) if reports else None,
            best_checkpoints=kept,
            _storage_filesystem=self._storage.filesystem,
        )

    def _close(self) -> None:
        """End every process of the run, and free its places. Ray does so itself if the program ends."""
        with self._lock:
            has_ray, self._over = self._has_ray, True
            actors = [worker.actor for worker in self._workers.values()] + [server.actor for server in self._servers]
            self._workers.clear()
        for ending in self._endings if has_ray else ():
            with contextlib.suppress(Exception):  # an actor that has ended gives no answer
                ray.get(ending, timeout=_PATIENCE_S)
        if self._rendezvous is not None:
            self._rendezvous.close()
        if not has_ray:
            return
        atexit.unregister(self._end_with_program)
        with contextlib.suppress(Exception):  # the program may have left the cluster
            for actor in [*actors, self._board.actor]:
                ray.kill(actor, no_restart=True)
            for group in self._groups:
                remove_placement_group(group)


def _check_driver() -> None:
    """Connect to Ray. Raises a :class:`LaunchError` if this process is outside of the cluster."""
    if ray.util.client.ray.is_connected():
        raise LaunchError(
            "This program is connected through Ray Client (ray://). Expected a driver on a node of the cluster, which "
            "workers can reach: submit the program with `ray job submit`."
        )
    if not ray.is_initialized():
        ray.init()


def _shown(found: dict[str, float], wanted: Iterable[str]) -> str:
    """How much there is of what is wanted."""
    return ", ".join(f"{found.get(name, 0):g} {name}" for name in wanted)
