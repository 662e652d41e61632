"""What a message costs real servers, over real sockets: the CPU time of the coordinator's and of a shard's process.

    python benchmarks/scale_sockets.py                    # a quarter of an hour
    python benchmarks/scale_sockets.py --zmq 16 64 --rpc 16

Two servers are started as a job's main process starts them. Clients connect to them, with the code of workers up to the
training: see :mod:`scale_clients`. With ZeroMQ a process has several clients; with RPC, which allows one, there are as
many processes as fit into the memory. They are forked after the imports. They send one kind of message after the other,
as fast as the servers answer. Meanwhile the kernel counts the CPU time of each server's process: what a message costs
with its way through the sockets, decryption, decoding, and the reply. What an idle server takes for its clock and for
ZeroMQ's own heartbeats is measured first, and subtracted; a figure is not valid if that is more than half of it.

A claim is a lease request, here for one step of 2 s. An exchange pushes and fetches a thousand weights per server by
value. A beat is a heartbeat. Beats and exchanges go to both servers. Clients leave and join while all others are
connected; a client that joins connects, allocates the shards, and waits for the replies. Medians, minima and maxima
are of the repeats.

The goal: from the fewest to the most clients no kind of message costs more than three times as much. A kind without a
valid figure fails, and so does a transport with one number of clients: it shows no growth.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from common import CONSOLE, prepared
from ranks import end_all
from rich.table import Table
from scale_clients import SERVERS, SESSION, Place, live
from scale_job import SCALARS
from scale_limits import GOAL, measure_limits, show_limits

from lightning_asgd.core.job import registry, supervisor
from lightning_asgd.core.job.addresses import LOOPBACK, interface_of
from lightning_asgd.core.server.process import ServerSettings

ZMQ, RPC = (16, 64, 256, 1024), (16, 32, 64)
PROCESSES = 16  # with ZeroMQ
CHURNED = {"zmq": 16, "rpc": 4}  # clients that leave in a repeat, and as many that join: with RPC each is a process
MESSAGES = 4096  # of a kind and repeat, at least as many as there are clients
SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)  # scalars of a shard
FEW, LEAST, MOVED = 4, 3, 100_000_000  # clients, rounds at least, and scalars at most, for each of these sizes
IDLE_S, START_S, MOST_S = 4.0, 60.0, 300.0
MEMORY = 120 << 20  # bytes that a forked process with one client takes, at most
ROLES = ("coordinator", "shard")
PHASES = ("claim", "exchange", "beat", "contribution")
KINDS = {"coordinator": (*PHASES, "join", "leave"), "shard": ("exchange", "beat", "join", "leave")}


def cpu_s(process: int) -> float:
    """Seconds of CPU time of a process, as Linux counts them for its clock: exact, where /proc has hundredths."""
    if sys.platform == "linux":
        return time.clock_gettime((~process << 3) | 2)
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


@dataclass
class Costs:
    """What servers take.

    Attributes:
        us: microseconds of a message by server and kind, of each repeat.
        idle: the share of a core that an idle server takes.
        invalid: figures of which more than half was what an idle server takes.
    """

    us: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    idle: dict[str, float] = field(default_factory=dict)
    invalid: set[tuple[str, str]] = field(default_factory=set)


class Crowd:
    """Forked processes that have clients, and the servers, which are started after them."""

    def __init__(self, transport: str, workers: int, spares: int) -> None:
        context = multiprocessing.get_context("fork")
        self.transport, self.workers = transport, workers
        self.homes = min(workers, PROCESSES if transport == "zmq" else workers)
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for _ in range(self.homes + spares):
            mine, theirs = context.Pipe()
            process = context.Process(target=live, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.servers: list[int] = []

    def start(self, scalars: int) -> Place:
        """Start the servers, as a job's main process does."""
        kind = registry.kind_of(self.transport)
        self.rendezvous = kind.host_rendezvous()
        settings = ServerSettings(interface=interface_of(LOOPBACK), transport=self.transport, job=SESSION)
        keys = supervisor.ensure(SERVERS, self.rendezvous, settings).keys(SERVERS)
        addresses = tuple(self.rendezvous.server(index, key, START_S) for index, key in enumerate(keys))
        self.servers = [self.rendezvous.get(key, "a server", START_S)["pid"] for key in keys]
        return Place(self.transport, addresses, self.workers, scalars)

    def ranks(self, home: int) -> list[int]:
        """The clients of a process."""
        return list(range(home, self.workers, self.homes))

    def order(self, homes: list[int], what: str, *about: Any, **options: Any) -> int:
        """Have processes do something; returns how many messages they have sent in all."""
        for home in homes:
            self.pipes[home].send((what, about, options))
        return sum(self.answer(home) for home in homes)

    def answer(self, home: int) -> int:
        """What a process has answered. Raises a ``RuntimeError`` with its error, or if it does not answer."""
        if not self.pipes[home].poll(MOST_S):
            raise RuntimeError(f"A process with {len(self.ranks(home))} clients did not answer within {MOST_S:g} s.")
        try:
            answer = self.pipes[home].recv()
        except EOFError:
            raise RuntimeError("A process with clients has ended.") from None
        if not isinstance(answer, int):
            raise RuntimeError(str(answer))
        return answer

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(("end",))
        for process in self.processes:
            process.join(10)
        end_all(self.processes)
        supervisor.close_current()
        if self.servers:
            self.rendezvous.close()


@contextlib.contextmanager
def crowd_of(transport: str, workers: int, spares: int) -> Iterator[Crowd]:
    """A crowd, which is ended in any case."""
    crowd = Crowd(transport, workers, spares)
    try:
        yield crowd
    finally:
        crowd.close()


class Meter:
    """Measures what the servers' processes take."""

    def __init__(self, servers: list[int], costs: Costs) -> None:
        self.servers, self.costs = servers, costs

    def idle(self) -> None:
        """Measure what they take while no client sends anything."""
        time.sleep(IDLE_S / 2)  # the last acknowledgements come
        begun, before = time.monotonic(), [cpu_s(server) for server in self.servers]
        time.sleep(IDLE_S)
        seconds = time.monotonic() - begun
        for role, server, then in zip(ROLES, self.servers, before, strict=True):
            self.costs.idle[role] = (cpu_s(server) - then) / seconds

    @contextlib.contextmanager
    def of(self, kind: str) -> Iterator[list[int]]:
        """Measure messages of a kind, whose number is to be put into the list."""
        number: list[int] = []
        begun, before = time.monotonic(), [cpu_s(server) for server in self.servers]
        yield number
        seconds = time.monotonic() - begun
        for role, server, then in zip(ROLES, self.servers, before, strict=True):
            if kind in KINDS[role]:
                spent, idle = cpu_s(server) - then, seconds * self.costs.idle[role]
                self.costs.us[role, kind].append((spent - idle) / number[0] * 1e6)
                if idle > spent / 2:
                    self.costs.invalid.add((role, kind))


def measure(transport: str, workers: int, repeats: int, scalars: int = SCALARS) -> Costs:
    """What messages cost with a number of clients."""
    costs, churned = Costs(), min(CHURNED[transport], (workers - 1) // repeats)
    with crowd_of(transport, workers, 1 if transport == "zmq" else churned * repeats) as crowd:
        place = crowd.start(scalars)
        homes = list(range(crowd.homes))
        for home in homes:
            crowd.pipes[home].send(("join", (place, crowd.ranks(home)), {}))
            if home == 0:
                crowd.answer(0)  # it brings the weights
        for home in homes[1:]:
            crowd.answer(home)
        crowd.order(homes, "all_do", "contribution", 1)
        crowd.order(homes, "all_do", "claim", 2)
        crowd.order(homes, "all_do", "exchange", 1)
        meter = Meter(crowd.servers, costs)
        rounds = max(1, MESSAGES // workers)
        for _ in range(repeats):
            meter.idle()
            for kind in PHASES:
                with meter.of(kind) as number:
                    number.append(crowd.order(homes, "all_do", kind, rounds))
        for repeat in range(repeats):
            meter.idle()
            churn(crowd, meter, place, range(1 + repeat * churned, 1 + (repeat + 1) * churned))
    return costs


def churn(crowd: Crowd, meter: Meter, place: Place, ranks: range) -> None:
    """Have clients leave, and other processes replace them."""
    spares = len(crowd.pipes) - crowd.homes
    homes = [rank % crowd.homes for rank in ranks]
    with meter.of("leave") as number:
        number.append(sum(crowd.order([home], "leave", [rank]) for home, rank in zip(homes, ranks, strict=True)))
    crowd.order(sorted(set(homes)), "drop")
    with meter.of("join") as number:
        others = [crowd.homes + (rank - 1) % spares for rank in ranks]
        joined = (
            crowd.order([home], "join", place, [rank], replaces=True) for home, rank in zip(others, ranks, strict=True)
        )
        number.append(sum(joined))


def measure_sizes(transport: str) -> dict[int, float]:
    """What an exchange costs a shard's process, in microseconds, by the scalars of the shard."""
    found = {}
    for scalars in SIZES:
        costs = Costs()
        with crowd_of(transport, FEW, 0) as crowd:
            place, homes = crowd.start(scalars), list(range(crowd.homes))
            for home in homes:
                crowd.order([home], "join", place, crowd.ranks(home))
            crowd.order(homes, "all_do", "exchange", 2)
            meter = Meter(crowd.servers, costs)
            meter.idle()
            rounds = max(LEAST, min(MESSAGES, MOVED // scalars) // FEW)
            with meter.of("exchange") as number:
                number.append(crowd.order(homes, "all_do", "exchange", rounds))
        (found[scalars],) = costs.us["shard", "exchange"]
    return found


# ---------------------------------------------------------------------- what came out

Found = dict[str, dict[int, Costs]]
"""Costs by transport and number of clients."""


def show(found: Found) -> bool:
    """Print the figures, and whether each grows as little as it should; returns whether all do."""
    good = True
    for transport, by_size in found.items():
        sizes = sorted(by_size)
        table = Table(title=f"{transport}: µs of CPU time of a server's process per message", title_justify="left")
        for column in ("server", "message", *(f"{size:,} clients" for size in sizes), "growth", ""):
            table.add_column(column, justify="left" if column in ("server", "message", "") else "right", no_wrap=True)
        for role in ROLES:
            for kind in KINDS[role]:
                us = [by_size[size].us.get((role, kind), []) for size in sizes]
                middle = [statistics.median(each) if each else 0.0 for each in us]
                each = zip(middle, us, strict=True)
                cells = [f"{m:,.0f} ({min(found):,.0f}-{max(found):,.0f})" if found else "-" for m, found in each]
                growth, verdict = middle[-1] / max(1.0, middle[0]), "PASS"
                if len(sizes) < 2 or not all(us) or any((role, kind) in by_size[size].invalid for size in sizes):
                    verdict = "not valid"
                elif growth > GOAL:
                    verdict = "FAIL"
                good &= verdict == "PASS"
                table.add_row(role, kind, *cells, f"x {growth:.2f}", verdict)
            idle = [f"{100 * by_size[size].idle[role]:.1f} %" for size in sizes]
            table.add_row(role, "idle, of a core", *idle)
        CONSOLE.print(table)
    return good


def fitting(sizes: list[int]) -> list[int]:
    """Of numbers of processes, those for which there is memory."""
    free = psutil.virtual_memory().available // 2
    fit = [size for size in sizes if 2 * size * MEMORY <= free]
    for size in sizes:
        if size not in fit:
            CONSOLE.print(f"[dim]{size} processes of RPC do not fit into half of the free memory, {free >> 20:,} MB[/]")
    return fit


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--zmq", type=int, nargs="*", default=list(ZMQ), help="numbers of clients with ZeroMQ")
    parser.add_argument("--rpc", type=int, nargs="*", default=list(RPC), help="numbers of clients with RPC")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--no-sizes", action="store_false", dest="sizes", help="measure no larger shards")
    parser.add_argument("--link", type=float, default=0.0, metavar="MBIT", help="Mbit/s of the network, as a limit")
    args = parser.parse_args()
    CONSOLE.print(f"[bold]scale over sockets[/]: {args.repeats} repeats (load {os.getloadavg()[0]:.1f})")
    found: Found = {}
    with prepared(one_thread=True):
        for transport, sizes in (("zmq", sorted(args.zmq)), ("rpc", fitting(sorted(args.rpc)))):
            if sizes:
                registry.kind_of(transport).provide_secret(one_machine=True)
            for size in sizes:
                begun = time.monotonic()
                found.setdefault(transport, {})[size] = measure(transport, size, args.repeats)
                CONSOLE.print(f"  {transport}, {size:5} clients: {time.monotonic() - begun:.0f} s")
        good = show(found)
        if args.sizes:
            sizes = {f"exchange, {transport}": measure_sizes(transport) for transport in found}
            show_limits(CONSOLE, measure_limits(args.link, sizes))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
