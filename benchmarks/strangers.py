"""Processes and messages that should not be there: what a job makes of them, and what they cost its servers.

    python benchmarks/strangers.py                        # all of it: ten minutes
    python benchmarks/strangers.py --only 'restarted node' --transport rpc
    python benchmarks/strangers.py --places job           # without root: on this machine only

Two workers train in each place: a job of two nodes, and a run of `lightning-asgd serve`; over RPC and ZeroMQ; on two
machines (network namespaces, as root under Linux), else on this one. While they train each of these is tried:

* a second start of a living worker, and a second job at the same port;
* a node is killed and started again, ten times, and must train again within 3 s after its imports;
* a worker that is stopped, and replaced, wakes up: it must be rejected with an error that names it;
* 10,000 random keys and values written where there is a store, or garbage where there is none;
* 1,500 idle connections to a server whose limit of open files is 1,024;
* 10,000 fuzzed messages: random bytes, and real messages of which something was changed, from someone who knows the
  secret.

The job must go on. Within ten seconds its servers must be back to the CPU time and memory of before. At the end both
workers exit with 0, and every sample was trained exactly once per epoch. With RPC, which has no authentication, the
server may be replaced meanwhile. Besides, a node raises an exception at step 20, and a run's server sees 2,000 workers
come and go; and ``strangers_server.py`` sends a lone server 20,000 connections and 20,000 messages.

Exits with 1 unless all of this holds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: one thread per worker, and nothing that forbids to fork

from common import CONSOLE, prepared, verdict
from network import Network, available, two_machines
from rich.markup import escape
from strangers_jobs import SAMPLES, SILENCE_S, Job, Load, Place, serve
from strangers_server import attack_a_server, fuzz, workers_that_come_and_go, write_keys

WITHIN_S = 10.0  # until the servers use what they used before
MORE_CPU, MORE_MB = 0.15, 20.0  # of a second per second, and of memory: what varies without any stranger
REJOIN_S = 3.0
RESTARTS = 10
IDLE = 1500
MESSAGES = 10_000


# ---------------------------------------------------------------------- what is tried while two workers train
# Each returns what was seen, and raises an AssertionError or a RuntimeError if the job did not do what it should.


def refused(job: Job, name: str, seconds: float, text: str) -> str:
    """The line in which a process says that it was refused."""
    code = job.exit_code(name, seconds)
    said = job.said(name)
    found = re.search(f"[^\n]*{text}[^\n]*", said)
    assert code not in (None, 0), f"a process that should be refused has exit code {code}: {said[-1500:]}"
    assert found, f"it was not rejected by an error that names it: {said[-1500:]}"
    return f"refused: {found[0].strip()[:110]}..."


def second_start(job: Job, chance: random.Random) -> str:
    """A second start of the worker of node 1, which lives; of a run, a second `serve` at its port."""
    if job.place.serves:
        return refused(job, job.start(1, run="another"), 40, "serves run 'strangers'")
    return refused(job, job.start(1), 40, "claimed rank 1, which process")


def second_job(job: Job, chance: random.Random) -> str:
    """The first node of a second job at the same port."""
    if job.place.serves:
        job.fork("second", serve, job.place, job.folder.parent / "second.log", job.port, 1)
        job.processes["second"].join(30)
        assert job.processes["second"].exitcode not in (None, 0)
        return f"its exit code is {job.processes['second'].exitcode}"
    return refused(job, job.start(0), 60, "Error: .*(in use|EADDRINUSE|taken|belong)")


def restarted(job: Job, chance: random.Random) -> str:
    """Node 1 is killed and started again."""
    took = []
    for _ in range(RESTARTS if job.about.get("restarts") else 2):
        time.sleep(chance.uniform(0.2, 1.0))
        job.signal(job.members[1], signal.SIGKILL)
        job.processes[job.members[1]].join()
        name = job.members[1] = job.start(1)
        job.wait(lambda name=name: job.is_in(name), 30, "training of the restarted node")  # type: ignore[misc]
        took.append(job.told(name)["in_s"])
    assert max(took) < REJOIN_S, f"seconds from imports to the first batch: {took}"
    return f"{len(took)} times, in after {min(took):.1f} to {max(took):.1f} s"


def stale(job: Job, chance: random.Random) -> str:
    """A worker is stopped, another process takes its place, and it wakes up."""
    old = job.members[1]
    job.signal(old, signal.SIGSTOP)
    time.sleep(0 if job.place.serves else SILENCE_S + 1)
    name = job.members[1] = job.start(1)
    job.wait(lambda: job.is_in(name), 30, "training of the process in its place")
    job.train()
    job.signal(old, signal.SIGCONT)
    if job.place.serves:  # there it has a number of its own, and rejoins
        time.sleep(2)
        assert job.lives(old)
        job.signal(old, signal.SIGTERM)
        job.processes[old].join(20)
        return "it rejoined under its own number"
    return refused(job, old, 40, "claimed rank 1, which process")


def keys(job: Job, chance: random.Random) -> str:
    """Random keys and values in the store."""
    return in_another(job, write_keys, job.place.address(), job.port, MESSAGES)


def idle(job: Job, chance: random.Random) -> str:
    """Connections that send nothing, to the server and to the rendezvous."""
    import resource

    def connect(end: Any) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * IDLE), hard))
        place, opened = server_of(job), []
        for _ in range(IDLE):
            with contextlib.suppress(OSError):
                opened.append(socket.create_connection(place, 5.0))
        end.send(f"{len(opened):,} connections")
        end.recv()

    with aside(job, connect) as end:
        said: str = end.recv()
        job.train()
        end.send("enough")
    job.train()
    return said


def fuzzed(job: Job, chance: random.Random) -> str:
    """Random bytes, and messages of someone who knows the secret."""
    addresses = job.told(job.members[1])["servers"]
    session = job.told(job.members[1])["session"]
    about = (job.place.transport, addresses[0], server_of(job), session)
    return in_another(job, fuzz, *about, MESSAGES, chance.randrange(1 << 30))


TRIED: dict[str, Callable[[Job, random.Random], str]] = {
    "second start": second_start,
    "second job": second_job,
    "restarted node": restarted,
    "stale process": stale,
    "random keys": keys,
    "idle connections": idle,
    "fuzzed messages": fuzzed,
}


def server_of(job: Job) -> tuple[str, int]:
    """Where the job's server is reached, as the second machine knows: on two machines through the gateway."""
    address = job.told(job.members[1])["servers"][0]
    return job.place.address(), int(urlparse(address if "://" in address else f"tcp://{address}").port or 0)


@contextlib.contextmanager
def aside(job: Job, target: Callable[[Any], None]) -> Iterator[Any]:
    """A process on the second machine that is no part of the job, and a pipe to it."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()

    def run() -> None:
        job.place.enter(1)
        target(theirs)

    process = context.Process(target=run)
    process.start()
    theirs.close()
    try:
        yield mine
        process.join(120)
    finally:
        process.kill()
        process.join()


def in_another(job: Job, call: Callable[..., str], *args: Any) -> str:
    """What a function returns in such a process."""

    def answer(end: Any) -> None:
        try:
            end.send((call(*args), ""))
        except Exception as error:
            end.send(("", f"{call.__name__}: {error!r}"))

    with aside(job, answer) as end:
        deadline = time.monotonic() + 180
        while not end.poll(0.2):
            assert time.monotonic() < deadline, f"{call.__name__} takes too long"
            job.wait(lambda: True, 1, "job")
        said, wrong = end.recv()
    assert not wrong, wrong
    job.train()
    return str(said)


# ---------------------------------------------------------------------- one place after the other


def back(job: Job, before: Load) -> tuple[bool, str]:
    """Whether the servers use in time what they used before, and what they use."""
    begun = time.monotonic()
    while True:
        now = job.load()
        fine = now.cpu <= before.cpu + MORE_CPU and now.mb <= before.mb + MORE_MB
        if fine or time.monotonic() - begun > WITHIN_S:
            text = f"CPU {before.cpu:.2f} -> {now.cpu:.2f} s/s, memory {before.mb:.0f} -> {now.mb:.0f} MB"
            return fine, f"{text} after {time.monotonic() - begun:.0f} s"


def disturb(place: Place, names: list[str], chance: random.Random, restarts: bool) -> bool:
    """Whether two workers train on undisturbed whatever is tried."""
    good = True
    with tempfile.TemporaryDirectory() as folder, free_port(place) as port:
        (Path(folder) / "job").mkdir()
        job = Job(place, Path(folder) / "job", port, {"restarts": restarts})
        try:
            for name in names:
                before, server = job.load(), job.server.pid
                try:
                    said = TRIED[name](job, chance)
                    job.train()
                    fine, used = back(job, before)
                    if job.server.pid != server:
                        said += "; the server was replaced"
                        fine &= place.transport == "rpc"
                except AssertionError as error:
                    fine, said, used = False, str(error), ""
                good &= verdict(fine, f"{place.name}: {name}: {said}; {used}")
            codes, told = job.finish()
            done = set(codes.values()) == {0} and all(t.get("ended") for t in told)
            exact = done and all(t["seen"] == [[float(t["epochs"]), SAMPLES]] for t in told)
            epochs = told[0].get("epochs")
            text = f"exit codes {codes}, {SAMPLES} samples trained {epochs} times each: {'yes' if exact else told}"
            good &= verdict(exact, f"{place.name}: {text}")
        except RuntimeError as error:
            good = verdict(False, f"{place.name}: {error}")
        finally:
            job.close()
    return good


def raises(place: Place, policy: str) -> bool:
    """Whether people see on node 0 what was raised on node 1."""
    with tempfile.TemporaryDirectory() as folder, free_port(place) as port:
        job = Job(place, Path(folder), port, {"fails": True, "on_worker_failure": policy})
        try:
            first, second = job.members[0], job.members[1]
            code = job.exit_code(second, 60)
            begun = time.monotonic()
            while "KeyError: 'no such sample'" not in job.said(first) and time.monotonic() - begun < 5:
                time.sleep(0.02)
            took = time.monotonic() - begun
            (job.folder / "stop").touch()
            codes = job.exit_code(first, 60), code
            said = job.said(first)
            shown = all(text in said for text in ("orker 1", "KeyError: 'no such sample'", "on_train_batch_start"))
            shown &= socket.gethostname() in said and "strangers_jobs.py" in said
            if policy == "abort":
                fine = shown and 0 not in codes
            else:
                summary = "1 of 2 workers were lost during this fit:" in said and "lost: {1: " in said
                fine = shown and summary and codes == (0, 1) and took < 2.0
        finally:
            job.close()
    text = f"shown on node 0 {took:.1f} s after node 1 had ended, exit codes of nodes 0 and 1: {codes}"
    text = f"{place.name}: node 1 raises at step 20, on_worker_failure={policy!r}: {text}"
    return verdict(fine, text if fine else f"{text}\n{said}")


@contextlib.contextmanager
def free_port(place: Place) -> Iterator[int]:
    """A port that nothing listens on; in a namespace of its own any."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
    yield port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = ["exception", "come and go", "server"]
    parser.add_argument("--only", choices=[*TRIED, *others], action="append", help="may be given several times")
    parser.add_argument("--transport", choices=("rpc", "zmq"), help="the default is both")
    parser.add_argument("--places", choices=("two", "job", "serve"), action="append", help="the default is all three")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance, reason, good, begun = random.Random(args.seed), available(), True, time.monotonic()
    chosen = args.only or [*TRIED, *others]
    names = [name for name in TRIED if name in chosen]
    transports = [args.transport] if args.transport else ["rpc", "zmq"]
    where = args.places or ["two", "job", "serve"]
    if reason is not None:
        CONSOLE.print(f"No two machines here: {escape(reason)}", style="dim")
        where = [kind for kind in where if kind != "two"]
    with prepared(one_thread=True, secret=True), contextlib.ExitStack() as stack:
        network: Network | None = stack.enter_context(two_machines()) if reason is None else None
        for transport in transports:
            for kind in where if names else []:
                place = Place(transport, network if kind == "two" else None, kind == "serve")
                good &= disturb(place, names, chance, restarts=kind == where[0])
            for policy in ("continue", "abort") if "exception" in chosen else ():
                good &= raises(Place(transport, network, False), policy)
        if "come and go" in chosen:
            good &= verdict(*workers_that_come_and_go(2000))
        if "server" in chosen:
            good &= attack_a_server(MESSAGES, args.seed)
    CONSOLE.print(f"{time.monotonic() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
