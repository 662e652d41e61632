"""How long many workers of an elastic run take to continue with another host, after `serve` was killed.

    python benchmarks/takeover.py                      # 16, 64 and 256 workers, on one machine
    python benchmarks/takeover.py --workers 256

Two `lightning-asgd serve` with two servers each host a run over sockets (zmq); the second one has joined with `--join`.
The workers' real code runs in a few processes, many workers in each, on as many threads: finding the run, heartbeats,
exchanges, votes, and the restoration of the servers from their copies. Only the model is small (10,000 values), and a
step is a sleep of 0.5 s. The first `serve` is killed. Printed are the seconds until the second one takes over, and
until half of the workers, and the last, continue with restored servers. All share this machine's cores
with the hosts. The versions of the second host must count every update that workers were told of.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
from common import CONSOLE, prepared
from jobs import Processes, wait_until

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.layout import build_layout
from lightning_asgd.core.job import registry
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.protocol import Policy
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.session_client import HeartbeatThread, SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.core.worker.synchronizer import OwnData, Training, run
from lightning_asgd.elastic.attachment import Attachment
from lightning_asgd.hosting.run_finder import RunFinder
from lightning_asgd.recovery.failover_client import FailoverClient

SCALARS, SERVERS, STEP_S, NSYNC, SILENCE_S, BEAT_S = 10_000, 2, 0.5, 4, 10.0, 1.0
PROCESSES = 4
WAIT_S = 120.0
TAKES_OVER = "This host takes over"


class Worker:
    """One worker, on a thread of its own."""

    def __init__(self, places: list[tuple[str, int]]) -> None:
        self.finder = RunFinder(places)
        rendezvous, _, keys = Rendezvous.find_run(*self.finder.find(WAIT_S), WAIT_S)
        with rendezvous:
            addresses = [rendezvous.server(index, key, WAIT_S) for index, key in enumerate(keys)]
        self.transport = registry.kind_of("zmq").connect(addresses, "lo")
        self.client = SessionClient(Connection(self.transport, "takeover", 0, 0), policy=Policy(silence_s=SILENCE_S))
        attachment = Attachment(self.client)
        attachment.arrive("cpu")
        self.finder.worker = self.client.connection.worker
        config = ExchangeConfig.create(nsync=NSYNC, algorithm=ASGD("sum"))
        parameters = {"w": torch.zeros(SCALARS)}
        layout = build_layout(parameters.items(), SERVERS)
        replica = replica_for(config.algorithm, layout, [(parameters, "w")], [None] * SERVERS, remembers=True)
        shards = ShardClient(self.client)
        first = replica.weights() if attachment.bootstraps else None
        shards.initialise(layout, config.algorithm, [None] * SERVERS, first)
        if attachment.bootstraps:
            attachment.publish("layout", {}, None)
        self.exchanger = Exchanger(layout, [(shards, replica)], config, Training(data=OwnData()))
        run(self.exchanger.fetch())
        self.recovery = FailoverClient(
            self.client, Collectives(self.client), self.exchanger, lambda: None, self._successor
        )
        self.beats = HeartbeatThread(self.client, SILENCE_S, at_least_every_s=BEAT_S)
        self.parameters = parameters
        self.restored_at = 0.0
        """When its servers were restored."""
        run(self.exchanger.begin())

    def _successor(self, server: int) -> str:
        before = self.transport.addresses[server]
        while True:
            with contextlib.suppress(RuntimeError):
                way = self.finder.locate(WAIT_S)
                with Rendezvous.connect(*way, 2.0, elsewhere=True) as there:
                    keys = there.session("takeover", "zmq", WAIT_S)
                    return there.server(server, keys[server], WAIT_S, before)
            time.sleep(0.2)

    def step(self) -> int:
        """A step, and an exchange if one is due; the number of pushes that were answered."""
        run(self.exchanger.advance())
        if not self.restored_at and any(self.client.connection.restored):
            self.restored_at = time.monotonic()
        time.sleep(STEP_S * random.uniform(0.8, 1.2))
        self.parameters["w"] += 1.0
        self.exchanger.count_step()
        return self.exchanger.stats.pushes


def work(number: int, places: list[tuple[str, int]], folder: Path, process: int) -> None:
    """Some workers; tells how many train, and after the kill when each has completed another exchange."""
    trains: list[int] = []
    done: list[float] = []
    told: list[tuple[int, list[int]]] = []

    def live() -> None:
        worker = Worker(places)
        while not worker.step():
            pass
        trains.append(1)
        while not (folder / "killed").exists():
            worker.step()
        while not worker.restored_at:
            worker.step()
        done.append(worker.restored_at)
        while len(done) < number and not (folder / "end").exists():
            worker.step()
        run(worker.exchanger.flush())
        run(worker.exchanger.fetch())  # the last worker's versions count all flushed pushes
        told.append((worker.exchanger.stats.pushes, list(worker.exchanger.versions)))
        while not (folder / "end").exists():  # others' reports may be waited for
            time.sleep(0.5)

    threads = [threading.Thread(target=live, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    file = folder / f"{process}.json"
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.2)
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"trains": len(trains), "done": done, "told": told}))
        new.rename(file)
    os._exit(0)


class Hosts(Processes):
    """Two `serve` processes on this machine, of which the second one has joined; ``places`` are their addresses."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.places: list[tuple[str, int]] = []
        for number in range(2):
            joins = f"--join=127.0.0.1:{self.places[0][1]}" if number else f"--num-servers={SERVERS}"
            self.serve(f"serve-{number}", None, 0, "0/takeover", "--transport=zmq", joins)
            run = self.address(f"serve-{number}").partition("/")[0]  # of the second host: both addresses
            self.places.append(("127.0.0.1", int(run.rpartition(":")[2])))


def measure(workers: int) -> bool:
    """Kill the first host of a run with that many workers, and print how long the takeover takes."""
    with tempfile.TemporaryDirectory() as name:
        folder, fork = Path(name), multiprocessing.get_context("fork").Process
        hosts = Hosts(folder)
        share = workers // PROCESSES
        members = [fork(target=work, args=(share, hosts.places, folder, number)) for number in range(PROCESSES)]
        wait = partial(wait_until, seconds=WAIT_S, every_s=0.02)
        try:
            for member in members:
                member.start()

            def told(what: str) -> list[Any]:
                files = [folder / f"{number}.json" for number in range(PROCESSES)]
                return [json.loads(file.read_text())[what] for file in files if file.exists()]

            wait(lambda: sum(told("trains")) == workers, what="training")
            time.sleep(5.0)
            begun = time.monotonic()
            hosts.processes["serve-0"].kill()
            (folder / "killed").touch()
            took = wait(lambda: TAKES_OVER in hosts.said("serve-1"), what="takeover") - begun
            wait(lambda: sum(map(len, told("done"))) == workers, what="exchange of all workers")
            done = sorted(at - begun for each in told("done") for at in each)
            wait(lambda: sum(map(len, told("told"))) == workers, what="last exchange")
            results = [result for each in told("told") for result in each]
        finally:
            (folder / "end").touch()
            for member in members:
                member.join(10)
                member.kill()
            hosts.close()
    pushes, versions = sum(number for number, _ in results), max(versions for _, versions in results)
    CONSOLE.print(
        f"{workers} workers: takes over after {took:.1f} s; half of the workers continue with its servers after "
        f"{done[len(done) // 2]:.1f} s, the last after {done[-1]:.1f} s; {pushes} updates, versions {versions}"
    )
    return min(versions) >= pushes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, action="append", help="a multiple of 4; the default is 16, 64 and 256")
    args = parser.parse_args()
    for workers in args.workers or ():
        if workers < PROCESSES or workers % PROCESSES:
            parser.error(f"--workers {workers}. Expected a multiple of {PROCESSES}, the number of processes.")
    with prepared(one_thread=True, secret=True):
        good = [measure(workers) for workers in args.workers or [16, 64, 256]]
        return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
