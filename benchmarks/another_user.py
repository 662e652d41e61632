"""What another user of this machine gets into, beside what a job says at its start; as root.

    python benchmarks/another_user.py                        # all ways to run: five minutes on two cores
    python benchmarks/another_user.py --only Ray --transport zmq

A program trains in one of the ways to run. A process without any right of the job's user (65534, usually `nobody`)
then tries every port at which the job's processes listen:

* torch's store: it writes an entry;
* RPC: it has the process call a function that returns the user under which it runs;
* ZeroMQ: it sends a heartbeat without a secret, and with one of its own.

And it tries to read or write the files that the job has made: below TMPDIR, in /dev/shm, tables of embeddings.

Where the job has said that it "is encrypted and authenticated" nothing may succeed; where it has said "has no
authentication" a function must have run, or that warning would be wrong. The ports of gloo, which processes of an
island have, ask for nothing: they must be announced. Exits with 1 unless what was said is what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
import zmq
from interrupt import processes
from ranks import clean_environment
from rich.console import Console
from rich.table import Table
from stopping import WAYS, Job, Way, trainer

from lightning_asgd.core.protocol import Heartbeat
from lightning_asgd.transports.rpc import tensorpipe
from lightning_asgd.transports.zmq.transport import ZmqTransport

NOBODY = 65534
TRY_S, PROBE_S = 3.0, 10.0
CLOSED, OPEN = "is encrypted and authenticated", "has no authentication"
GLOO = "torch's process groups (gloo, NCCL) are neither encrypted nor authenticated"
RAYS = "/session_"  # the folder of Ray's own files
CONSOLE = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)
Port = tuple[str, int]


# ---------------------------------------------------------------------- what another user tries


def writes_to_a_store(port: Port) -> bool:
    """Whether torch's store is there and takes an entry."""
    store = dist.TCPStore(*port, is_master=False, timeout=timedelta(seconds=TRY_S))
    store.set("by another user", "1")
    return bool(store.get("by another user") == b"1")


def runs_code(port: Port) -> bool:
    """Whether a process there calls a function for this one, which has another user."""
    host, number = port
    agent = tensorpipe.Agent("stranger", "lo")
    name = agent.add_peer("victim", f"uv://[{host}]:{number}" if ":" in host else f"uv://{host}:{number}")
    assert name is not None
    return bool(agent.send(name, os.getuid, (), TRY_S).wait() == 0)


def is_answered_without_a_secret(port: Port) -> bool:
    """Whether ZeroMQ answers a client that has no key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(f"tcp://{port[0]}:{port[1]}")
        client.send_multipart([b"1", b"{}"])
        return bool(client.poll(int(1000 * TRY_S)))


def is_answered_with_another_secret(port: Port) -> bool:
    """Whether a server answers a client with a key of another job's."""
    transport = ZmqTransport([f"tcp://{port[0]}:{port[1]}"], "a secret that is known to no one else")
    try:
        transport.call(0, Heartbeat("stopping", 1), TRY_S).wait()
    finally:
        transport.close()
    return True


TRIES: dict[str, Callable[[Port], bool]] = {
    "code": runs_code,  # first: TensorPipe closes a port at which a connection has ended before its set-up
    "store": writes_to_a_store,
    "zmq": is_answered_without_a_secret,
    "secret": is_answered_with_another_secret,
}


def attempt(what: str, port: Port, found: Any) -> None:
    """Try one thing as another user, and tell whether it has succeeded."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(quiet, number)
    try:
        found.put(TRIES[what](port))
    except BaseException:  # refused, closed, or too late: it has not got in
        found.put(False)
    finally:
        os._exit(0)  # no handler of torch's may wait


def got_in(ports: Collection[Port]) -> dict[Port, list[str]]:
    """What another user gets at each port. One thing after the other is tried, at all ports at once."""
    context, successes = multiprocessing.get_context("fork"), {port: list[str]() for port in ports}
    for what in TRIES:
        found = {port: context.SimpleQueue() for port in ports}
        tries = [context.Process(target=attempt, args=(what, port, found[port])) for port in ports]
        for each in tries:
            each.start()
        until = time.monotonic() + PROBE_S
        for each in tries:
            each.join(max(until - time.monotonic(), 0))
            each.kill()
            each.join()
        for port, queue in found.items():
            if not queue.empty() and queue.get():
                successes[port].append(what)
    return {port: each for port, each in successes.items() if each}


def look_at(places: list[Path], found: Any) -> None:
    """Tell which files another user can read or write."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    open_to_all = []
    for place in places:
        folders = os.walk(place) if place.is_dir() else [(str(place.parent), [], [place.name])]
        for root, _, files in folders:  # goes where this user may go
            paths = [Path(root) / name for name in files]
            if RAYS not in root:
                open_to_all += [str(path) for path in paths if os.access(path, os.R_OK) or os.access(path, os.W_OK)]
    found.put(open_to_all)


# ---------------------------------------------------------------------- the job beside it


def ports(job: Job) -> dict[Port, str]:
    """Where processes of a job listen for connections, and which these are."""
    found = {}
    for process in processes(job.mark):
        with contextlib.suppress(psutil.Error):
            name = f"{process.pid} {' '.join(process.cmdline()[-3:])[:40]}"
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    ip = each.laddr.ip
                    found[({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ip, ip), each.laddr.port)] = name
    return found


def compare(way: Way, transport: str) -> tuple[list[str], bool]:
    """Run a job and try it; returns a row, and whether what it has said is what was found."""
    with tempfile.TemporaryDirectory(prefix="another-user-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        temporary = folder / "tmp"
        temporary.mkdir()
        temporary.chmod(0o1777)
        os.environ["TMPDIR"] = str(temporary)
        before = set(Path("/dev/shm").iterdir())
        job = Job(folder, transport)
        try:
            way.start(job)
            said = "\n".join("\n".join(lines) for lines in job.lines.values())
            listening = ports(job)
            files = multiprocessing.get_context("fork").SimpleQueue()
            looks = multiprocessing.get_context("fork").Process(
                target=look_at, args=([temporary, *(set(Path("/dev/shm").iterdir()) - before)], files)
            )
            looks.start()
            readable = files.get()
            looks.join()
            found = got_in(listening)
            time.sleep(0.5)
        finally:
            left = job.end()
            os.environ.pop("TMPDIR")
    problems = [f"left behind: {each}" for each in left]
    claims = [text for text in (CLOSED, OPEN, GLOO) if text in said]
    if way.name == "islands" and GLOO not in claims:
        problems.append("nothing was said of gloo")
    if OPEN in claims and not any("code" in successes for successes in found.values()):
        problems.append("it was said that others can run code, and none ran")
    if OPEN not in claims:
        problems += [f"{port} of {listening[port]}: {', '.join(successes)}" for port, successes in found.items()]
    problems += [f"another user can read or write {path}" for path in readable]
    for problem in problems:
        CONSOLE.print(f"{way.name}, {transport}: {problem}")
    inside = [each for successes in found.values() for each in successes]
    got = ", ".join(f"{what} {inside.count(what)}" for what in TRIES if what in inside) or "nothing"
    row = [way.name, transport, "; ".join(claims) or "nothing", str(len(listening)), got, str(len(readable))]
    return [*row, "FAIL" if problems else ""], not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ways whose names contain this")
    parser.add_argument("--transport", choices=["rpc", "zmq"], help="one of them only")
    args = parser.parse_args()
    if os.geteuid() != 0:
        CONSOLE.print("Left out: only root can be another user.")
        return 0
    clean_environment()
    table = Table(title="Another user of this machine", title_justify="left")
    for heading in ("way", "transport", "the job says", "ports", "another user gets", "files", ""):
        table.add_column(heading)
    good = True
    for way in (*WAYS, Way("tables", trainer("tables"), {})):
        for transport in [args.transport] if args.transport else ["rpc", "zmq"]:
            if args.only in way.name:
                row, fine = compare(way, transport)
                good &= fine
                table.add_row(*row)
                CONSOLE.print("  ".join(row))
    CONSOLE.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
