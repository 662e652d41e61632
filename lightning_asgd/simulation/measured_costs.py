"""What messages cost a server on this machine: the real code is timed, for some seconds.

How a cost grows with the number of workers is measured on simulated jobs, in which the real service answers. What the
network's side of a message costs, and a GB of parameters, is measured on a server process that this one starts.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.layout import Role
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.supervisor import Supervisor
from lightning_asgd.core.protocol import Contribution, Exchange, Heartbeat, InitShard, LeaseRequest
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.core.worker.connection import COORDINATOR, Connection
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.plan.sizing import Calibration, ServerCosts
from lightning_asgd.simulation.problems import Quadratic
from lightning_asgd.simulation.run import Running, Simulation
from lightning_asgd.simulation.speeds import LogNormal
from lightning_asgd.simulation.worker import LeasedData

WORKERS = (16, 64, 256, 1024)
_STEPS, _BATCH = 6, 32  # of a simulated worker's part of an epoch, and samples of a step
_SCALARS = 1000  # of a small shard
_SIZES = (250_000, 4_000_000)  # of shards whose bytes are timed: a byte of a small one costs more
_LEAST_S, _REPEATS = 0.5, 3  # of a measurement: the system counts CPU time in hundredths of a second
_START_S = 60.0
_KINDS = {LeaseRequest: "claim_s", Exchange: "exchange_s", Heartbeat: "beat_s", Contribution: "contribution_s"}


def measure(workers: Sequence[int] = WORKERS) -> Calibration:
    """Measure what messages cost a server on this machine, with these numbers of workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as servers have it
    gc.disable()  # a collection goes through the simulation, and would count as the service's
    try:
        alone = {number: _of_service(number) for number in sorted(workers)}
        real = _of_process()
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    least = alone[min(alone)]
    message_s, exchange_s = real.beat_s - least.beat_s, real.exchange_s - least.exchange_s
    added = max(0.0, message_s), max(0.0, exchange_s), real.gbyte_s
    return Calibration({number: _with_transport(found, *added) for number, found in alone.items()}, "this machine")


def _with_transport(costs: ServerCosts, message_s: float, exchange_s: float, gbyte_s: float) -> ServerCosts:
    """Costs of the service, with what a transport adds to a small message and to an exchange."""
    return ServerCosts(
        claim_s=costs.claim_s + message_s,
        exchange_s=costs.exchange_s + exchange_s,
        beat_s=costs.beat_s + message_s,
        contribution_s=costs.contribution_s + message_s,
        gbyte_s=gbyte_s,
    )


# ---------------------------------------------------------------------- the service, with many workers


class _Timed(Running):
    """A simulation that notes the CPU time of every message."""

    def __init__(self, plan: Simulation) -> None:
        self.ns: defaultdict[type, int] = defaultdict(int)
        self.messages: defaultdict[type, int] = defaultdict(int)
        super().__init__(plan)

    def handle(self, server: int, message: Any) -> Any:
        """A server handles a message."""
        begun = time.thread_time_ns()
        answer = super().handle(server, message)
        self.ns[type(message)] += time.thread_time_ns() - begun
        self.messages[type(message)] += 1
        return answer


def _of_service(workers: int) -> ServerCosts:
    """What messages cost the coordinator, which has the only shard, without a transport."""
    plan = Simulation(
        problem=Quadratic(_SCALARS),
        workers=workers,
        exchange={"nsync": 5},
        speed=LogNormal(2.0, 0.3),
        data=LeasedData(workers * _STEPS * _BATCH, _BATCH),
    )
    running = _Timed(plan)
    running.ns.clear()  # the workers' first fetches
    running.messages.clear()
    running.run()
    return ServerCosts(**{name: running.ns[kind] / running.messages[kind] / 1e9 for kind, name in _KINDS.items()})


# ---------------------------------------------------------------------- a server process, with one worker


@dataclass
class ServerProcess:
    """A server process, and a worker's connection to it."""

    transport: Transport
    process: psutil.Process
    sessions: int = 0

    def cpu_s(self, ask: Callable[[], Any]) -> float:
        """Seconds of the server's CPU time per call of a function: the least of some measurements."""
        ask()
        return min(self._mean_cpu_s(ask) for _ in range(_REPEATS))

    def _mean_cpu_s(self, ask: Callable[[], Any]) -> float:
        before, begun, calls = self._spent_s, time.perf_counter(), 0
        while time.perf_counter() - begun < _LEAST_S:
            ask()
            calls += 1
        return (self._spent_s - before) / calls

    @property
    def _spent_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def worker(self, scalars: int) -> tuple[Connection, Callable[[], Any]]:
        """A worker of a new session, and what exchanges its shard."""
        self.sessions += 1
        connection = Connection(self.transport, f"measurement.{self.sessions}", 0, 1)
        SessionClient(connection).join()
        zeros = torch.zeros(scalars)
        groups = ((Role.PARAMETER, "float32", scalars),)
        connection.ask(COORDINATOR, InitShard(*connection.sender, groups, ASGD(), (zeros,)))
        pushes = iter(range(1, 1 << 40))

        def exchange() -> Any:
            message = Exchange(*connection.sender, next(pushes), 0, True, True, (zeros,), steps=1)
            return connection.ask(COORDINATOR, message)

        return connection, exchange


@contextmanager
def server_process() -> Iterator[ServerProcess]:
    """Start a server process, and end it."""
    name = "zmq"
    try:
        registry.kind_of(name).check_available()
    except ConfigurationError:
        name = "rpc"
    before = set(os.environ)
    with ExitStack() as stack:
        stack.callback(_forget_variables, before)
        registry.kind_of(name).provide_secret(one_machine=True)
        rendezvous = registry.kind_of(name).host_rendezvous()
        stack.callback(rendezvous.close)
        supervisor = Supervisor(rendezvous, ServerSettings(transport=name))
        stack.callback(supervisor.close)
        supervisor.start()
        supervisor.add_servers(1)
        (key,), (pid,) = supervisor.keys(1), supervisor.server_pids
        address = rendezvous.get(key, "A server", _START_S, supervisor.check_servers)["address"]
        transport = registry.kind_of(name).connect([address], "lo")
        stack.callback(transport.close)
        yield ServerProcess(transport, psutil.Process(pid))


def _forget_variables(before: set[str]) -> None:
    for variable in set(os.environ) - before:  # the secret: a measurement leaves the environment as it was
        del os.environ[variable]


def _of_process() -> ServerCosts:
    """What heartbeats and exchanges cost a server process that has one worker."""
    with server_process() as server:
        connection, exchange = server.worker(_SCALARS)
        beat_s = server.cpu_s(lambda: connection.ask(COORDINATOR, Heartbeat(*connection.sender)))
        small_s = server.cpu_s(exchange)
        speeds = [
            4 * (size - _SCALARS) / max(server.cpu_s(server.worker(size)[1]) - small_s, 1e-9) / 1e9 for size in _SIZES
        ]
    return ServerCosts(beat_s=beat_s, exchange_s=small_s, gbyte_s=statistics.geometric_mean(speeds))
