"""Seconds and CPU seconds of an exchange through the gateway at a job's one port, beside one without the detour.

    python benchmarks/one_port_speed.py                   # 2.5 MB and 25 MB
    python benchmarks/one_port_speed.py --mbit 1000       # between two machines (network namespaces), as root

A worker (this process) and a server on loopback, encrypted, or on two machines with a cable of that speed. All share
the cores, which they do not where workers are on other machines. Exchanges with and without the gateway are taken in
turns. Medians, with the middle half.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import torch
from exchange import Worker
from network import Network, two_machines
from torch.futures import Future

from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.job import registry, supervisor
from lightning_asgd.core.job.addresses import LOOPBACK, ServerAddress
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.core.server.service import Service
from lightning_asgd.transports.zmq.server import ZmqServer

START_S, NETWORK_S = 60.0, 200.0
NAME = "server000000"


class Both(Transport):
    """Two ways to one server, of which one is used now."""

    def __init__(self, ways: dict[str, Transport]) -> None:
        self.ways = ways
        self.now = min(ways)

    @property
    def num_servers(self) -> int:
        """See :class:`Transport`."""
        return 1

    def call(self, server: int, message: Any, timeout_s: float) -> Future[Any]:
        """See :class:`Transport`."""
        return self.ways[self.now].call(server, message, timeout_s)

    def close(self) -> None:
        """See :class:`Transport`."""
        for way in self.ways.values():
            way.close()


def middle(values: list[float]) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{1e3 * median:.1f} ms ({1e3 * low:.1f}-{1e3 * high:.1f})"


def measure(both: Both, session: str, megabytes: float, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds and CPU seconds of exchanges, by the way that they take."""
    processes = [psutil.Process(), *psutil.Process().children()]
    found: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in both.ways}
    worker = Worker(both, session, int(megabytes * 1e6 / 4), False)
    for number in range(rounds + 5):
        for way, (took, used) in found.items():
            both.now = way
            worker.pack()
            before, begun = sum(sum(each.cpu_times()[:2]) for each in processes), time.perf_counter()
            worker.exchange()
            if number >= 5:
                took.append(time.perf_counter() - begun)
                used.append(sum(sum(each.cpu_times()[:2]) for each in processes) - before)
    both.close()
    return found


def host(network: Network, told: Any, over: Any) -> None:
    """A service that is reached with and without a gateway, on the first machine."""
    network.enter(0)
    torch.set_num_threads(1)
    kind, secret, service = registry.kind_of("zmq"), os.environ[SECRET_ENV], Service()
    rendezvous = kind.host_rendezvous(network.addresses[0])
    kind.open_to_others(rendezvous, "lo")
    direct = ZmqServer(service.handle, network.addresses[0], secret)
    behind = ZmqServer(service.handle, LOOPBACK, secret, name=NAME)
    rendezvous.put("server", {"address": behind.address, "name": NAME})
    number = rendezvous.peek("server", dict)["number"]
    told.put({"direct": direct.address, "gateway": str(ServerAddress(*rendezvous.address, NAME, number))})
    over.wait()
    rendezvous.close()
    direct.close()
    behind.close()


def work(network: Network, told: Any, over: Any, megabytes: float, rounds: int) -> None:
    """The worker on the second machine."""
    network.enter(1)
    torch.set_num_threads(1)
    kind = registry.kind_of("zmq")
    both = Both({way: kind.connect([address], "lo") for way, address in told.get().items()})
    found = {way: took for way, (took, _) in measure(both, "s", megabytes, rounds).items()}
    ratio = statistics.median(found["gateway"]) / statistics.median(found["direct"])
    about = (
        f"{middle(found['gateway'])} through the gateway, {middle(found['direct'])} without: {ratio:.2f} of the time"
    )
    print(f"{megabytes:g} MB: {about}", flush=True)
    over.set()


def over_network(mbit: float, megabytes: float, rounds: int) -> None:
    """Print what exchanges take between two machines."""
    fork = multiprocessing.get_context("fork")
    with two_machines(mbit=mbit) as network:
        told, over = fork.Queue(), fork.Event()
        processes = [
            fork.Process(target=host, args=(network, told, over)),
            fork.Process(target=work, args=(network, told, over, megabytes, rounds)),
        ]
        for each in processes:
            each.start()
        for each in reversed(processes):
            each.join(NETWORK_S)
            each.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[2.5, 25.0], help="of the vector")
    parser.add_argument("--rounds", type=int, default=60, help="exchanges each")
    parser.add_argument("--mbit", type=float, help="speed of the cable between two machines; without it, one machine")
    args = parser.parse_args()
    os.environ[SECRET_ENV] = "known to this benchmark alone"
    torch.set_num_threads(1)
    if args.mbit is not None:
        for megabytes in args.megabytes:
            over_network(args.mbit, megabytes, args.rounds)
        return 0
    kind = registry.kind_of("zmq")
    rendezvous = kind.host_rendezvous()
    settings = ServerSettings(kind.open_to_others(rendezvous, "lo"), "zmq")
    keys = supervisor.ensure(len(args.megabytes), rendezvous, settings).keys(len(args.megabytes))
    for server, megabytes in enumerate(args.megabytes):
        direct, entry = rendezvous.server(server, keys[server], START_S), rendezvous.peek_server(keys[server])
        behind = str(ServerAddress(*rendezvous.address, entry["name"], entry["number"]))
        both = Both({"direct": kind.connect([direct], "lo"), "gateway": kind.connect([behind], "lo")})
        found = measure(both, f"{megabytes} MB", megabytes, args.rounds)
        (took, used), (took_alone, used_alone) = found["gateway"], found["direct"]
        ratio = statistics.median(took) / statistics.median(took_alone)
        cpu = statistics.fmean(used) / statistics.fmean(used_alone)
        print(
            f"{megabytes:g} MB: {middle(took)} through the gateway, {middle(took_alone)} without: "
            f"{ratio:.2f} of the time, {cpu:.2f} of the CPU time",
            flush=True,
        )
    supervisor.close_current()
    rendezvous.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
