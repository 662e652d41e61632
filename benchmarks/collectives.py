"""What collectives cost the coordinator, by the number of workers: CPU time per contribution and bytes of the replies.

    python -m benchmarks.collectives                        # a service in this process, without a network
    python -m benchmarks.collectives --sockets 16 64 256    # a server's process, and encrypted ZeroMQ to its clients
    python -m benchmarks.collectives --most 256 --rounds 3

Workers contribute in a random order that a seed determines. CPU time is that of the thread that handles the messages,
or of the server's process, so programs that run beside it change it little. Replies are encoded as for ZeroMQ. Exits
with 1 if the CPU time per contribution of a reduction grows more than threefold from 16 workers to the most, or the
bytes of a worker's reply grow by more than a tenth.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_asgd.core.calls.reliable_calls import EncodedOnce
from lightning_asgd.core.job.addresses import LOOPBACK
from lightning_asgd.core.protocol import Contribution, Failure, Join, SyncReport, WorkerMetrics
from lightning_asgd.core.protocol.field_types import checked
from lightning_asgd.core.server.service import Service
from lightning_asgd.core.worker.session_client import pickled
from lightning_asgd.transports.zmq import sockets as zmq_sockets
from lightning_asgd.transports.zmq.server import ZmqServer
from lightning_asgd.transports.zmq.transport import ZmqTransport

CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
SECRET = "a secret of this benchmark"
WAIT_S = 120.0

Payload = Callable[[int], Any]


def _report(rank: int) -> SyncReport:
    figures = WorkerMetrics(1.7e9, 60.0, 1.5, 6000, 0, 100, 100, 230.0, 100, staleness={1: 50, 2: 50})
    return SyncReport(True, False, False, [] if rank == 0 else None, figures, trained=True)


# The name of each, how it is reduced (empty: it is not), and what a worker gives.
COLLECTIVES: dict[str, tuple[str, Payload]] = {
    "reduce, 16 float32": ("mean", lambda rank: [torch.full((16,), float(rank))]),
    "decide": ("any", lambda rank: rank == 3),
    "barrier": ("given", lambda rank: None),
    "sync report": ("report", _report),
    "all_gather, 16 float32": ("", lambda rank: torch.full((16,), float(rank))),
    "all_gather, an object": ("", lambda rank: pickled((f"machine-{rank}", "cuda:0"))),
}


def contributions(collective: str, workers: int, seq: int) -> list[Contribution]:
    """All workers' parts, in a random order."""
    how, payload = COLLECTIVES[collective]
    fields: dict[str, Any] = {"process": "here/1/aa", "reduction": how}
    ranks = random.Random(seq).sample(range(workers), workers)
    return [Contribution("s", rank, seq, "collective", collective, payload(rank), **fields) for rank in ranks]


# ---------------------------------------------------------------------- in this process


def in_process(collective: str, workers: int, rounds: int) -> tuple[float, float, float]:
    """Microseconds to handle a contribution and to encode a reply, medians; bytes of a reply, not the chief's."""
    service = Service()
    for rank in range(workers):
        service.handle(Join("s", rank, workers, process="here/1/aa"))
    encode = encoder()
    handled, encoded, size = [], [], 0
    for seq in range(1, rounds + 1):
        messages = contributions(collective, workers, seq)
        begun = time.thread_time()
        futures = [service.handle(message) for message in messages]
        handled.append(time.thread_time() - begun)
        replies = [future.value() for future in futures]
        assert not any(isinstance(reply, Failure) for reply in replies), replies[0]
        begun = time.thread_time()
        frames = [encode(number, reply) for number, reply in enumerate(replies)]
        encoded.append(time.thread_time() - begun)
        size = sum(memoryview(f).nbytes for f in frames[next(i for i, m in enumerate(messages) if m.worker)])
    per_worker_us = 1e6 / workers
    return statistics.median(handled) * per_worker_us, statistics.median(encoded) * per_worker_us, size


def encoder() -> Callable[[int, Any], list[Any]]:
    """What makes frames of a reply, as the server's side of ZeroMQ does."""
    once = EncodedOnce(zmq_sockets.encoded)
    return lambda number, reply: zmq_sockets.addressed([number], once(reply))


# ---------------------------------------------------------------------- over sockets


def serve() -> None:
    """A server's process: prints its address, and its CPU time for every line that it reads."""
    server = ZmqServer(checked(Service().handle), LOOPBACK, SECRET)
    print(server.address, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    server.close()


def over_sockets(collective: str, workers: int, rounds: int) -> tuple[float, float]:
    """Microseconds of the server's CPU time per contribution, and milliseconds of a collective; medians."""
    command = [sys.executable, "-m", "benchmarks.collectives", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        lines = server.stdout

        def cpu_s() -> float:
            print(file=server.stdin, flush=True)
            return float(lines.readline())

        transport = ZmqTransport([lines.readline().strip().removeprefix("tcp://")] * workers, SECRET)
        try:
            for rank in range(workers):
                transport.call(rank, Join("s", rank, workers, process="here/1/aa"), WAIT_S).wait()
            cpu, wall = [], []
            for seq in range(1, rounds + 1):
                messages = contributions(collective, workers, seq)
                before, begun = cpu_s(), time.perf_counter()
                for future in [transport.call(message.worker, message, WAIT_S) for message in messages]:
                    assert not isinstance(future.wait(), Failure)
                wall.append(time.perf_counter() - begun)
                cpu.append(cpu_s() - before)
        finally:
            transport.close()
            server.stdin.close()
    return statistics.median(cpu) * 1e6 / workers, statistics.median(wall) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=1024, help="workers, in this process")
    parser.add_argument("--sockets", type=int, nargs="*", default=[], help="numbers of clients over ZeroMQ")
    parser.add_argument("--rounds", type=int, default=9, help="collectives of each kind")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve:
        serve()
        return 0
    if given.sockets:
        table = Table("collective", "clients", "server's CPU µs per contribution", "ms per collective")
        for collective in COLLECTIVES:
            for workers in given.sockets:
                cpu_us, wall_ms = over_sockets(collective, workers, given.rounds)
                table.add_row(collective, str(workers), f"{cpu_us:.0f}", f"{wall_ms:.1f}")
        CONSOLE.print(table)
        return 0
    numbers = [workers for workers in (16, 64, 256, 1024) if workers <= given.most]
    columns = ("collective", "workers", "CPU µs: handling", "encoding", "growth", "bytes per worker", "bytes in all")
    table, missed = Table(*columns), []
    for collective, (how, _) in COLLECTIVES.items():
        first: tuple[float, float] | None = None
        for workers in numbers:
            handle_us, encode_us, size = in_process(collective, workers, given.rounds)
            first = first or (handle_us + encode_us, size)
            growth = (handle_us + encode_us) / first[0]
            figures = f"{handle_us:.1f}", f"{encode_us:.1f}", f"{growth:.2f}", f"{size:,}", f"{size * workers:,}"
            table.add_row(collective, str(workers), *figures)
            if how and (growth > 3 or size > 1.1 * first[1]):
                missed.append(f"{collective} with {workers} workers")
    CONSOLE.print(table)
    for miss in missed:
        CONSOLE.print(f"[red]missed:[/] {miss}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
