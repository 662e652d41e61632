"""Ctrl-C and SIGTERM in every process of every way to run: what each says, how it ends, what is left.

    python benchmarks/stopping.py                            # all: twenty minutes on two cores
    python benchmarks/stopping.py --only 'two nodes' --transport zmq

A program trains without end. Once all workers train, one of its processes gets SIGINT (a terminal's Ctrl-C reaches all
processes of a program at once) or SIGTERM. Then the process must end within ten seconds with at most three lines, but
for a server or Ray's worker, which ignores Ctrl-C, and is replaced after SIGTERM. If the others train on they are
stopped next, the same way. At the end no process may be left, and nothing in /dev/shm. Exits with 1 if one of this does
not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from interrupt import MARK, processes
from ranks import clean_environment, free_port
from rich.console import Console
from rich.table import Table

PROGRAM = Path(__file__).with_name("stopping_program.py")
WITHIN_S, START_S, LINES = 10.0, 90.0, 3
SECRET = "known to all of these processes"
SERVE = "from lightning_asgd.cli.command_line import main; raise SystemExit(main())"
SIGNALS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}
CONSOLE = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 140)


@dataclass
class Job:
    """The programs of a way to run, and their processes by role."""

    folder: Path
    transport: str
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, role: str, *command: str | Path, **variables: str) -> None:
        """Start a program, whose output goes into a file."""
        secret = {"LIGHTNING_ASGD_SECRET": SECRET} if self.transport == "zmq" else {}
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", **secret, **variables}
        with (self.folder / f"{role}.log").open("wb") as output:
            self.programs[role] = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env=environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def train(self, role: str, way: str, **variables: str) -> None:
        self.start(role, PROGRAM, way, self.transport, self.folder, **variables)

    @property
    def lines(self) -> dict[str, list[str]]:
        """What each program has written."""
        return {role: (self.folder / f"{role}.log").read_text(errors="replace").splitlines() for role in self.programs}

    def worker(self, number: int) -> psutil.Process:
        return psutil.Process(int((self.folder / f"worker{number}").read_text()))

    def server(self) -> psutil.Process:
        for process in sorted(processes(self.mark), key=lambda each: each.create_time()):
            with contextlib.suppress(psutil.Error):
                if "lightning_asgd.core.server.process" in process.cmdline() or "ServerActor" in process.name():
                    return process
        raise AssertionError("no server runs")

    def await_workers(self, number: int) -> None:
        until = time.monotonic() + START_S
        while len([each for each in self.folder.glob("worker*") if each.suffix == ""]) < number:
            ended = {role: each.poll() for role, each in self.programs.items() if each.poll() is not None}
            assert not ended, f"ended by themselves: {ended}\n{self.lines}"
            assert time.monotonic() < until, f"does not train after {START_S:g} s\n{self.lines}"
            time.sleep(0.05)
        time.sleep(2.0)  # the lines about who has joined

    def end(self) -> list[str]:
        """Stop all that is left; returns what of it should not be."""
        for program in self.programs.values():
            if program.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    program.send_signal(signal.SIGTERM)
        until = time.monotonic() + WITHIN_S
        while (left := processes(self.mark)) and time.monotonic() < until:
            for program in self.programs.values():
                program.poll()
            time.sleep(0.05)
        named = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                named.append(" ".join(process.cmdline())[:100])
                process.kill()
        for program in self.programs.values():
            program.wait()
        return named


def trainer(start_method: str) -> Callable[[Job], None]:
    def start(job: Job) -> None:
        job.train("main", start_method)
        job.await_workers(2)

    return start


def nodes(job: Job) -> None:
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for number in (0, 1):
        job.train(f"node {number}", "nodes", NODE_RANK=str(number), **about)
    job.await_workers(2)


def attached(job: Job) -> None:
    run = f"127.0.0.1:{free_port()}/stopping"
    job.start("serve", "-c", SERVE, "serve", run, f"--transport={job.transport}")
    for number in (1, 2):
        more = {"STOPPING_RUN": run, "STOPPING_NUMBER": str(number)}
        job.train(f"worker {number}", "attached", **more)
    job.await_workers(2)


def islands(job: Job) -> None:
    job.train("main", "islands")
    job.await_workers(4)


def loops(job: Job) -> None:
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for number in (0, 1):
        job.train(f"process {number}", "loop", RANK=str(number), LOCAL_RANK=str(number), **about)
    job.await_workers(2)


def on_ray(job: Job) -> None:
    job.train("driver", "ray")
    job.await_workers(2)


@dataclass(frozen=True)
class Way:
    """A way to run; ``roles`` are its processes: a program, a worker with its number, or a server."""

    name: str
    start: Callable[[Job], None]
    roles: dict[str, int | None]


WAYS = (
    Way("Trainer", trainer("popen"), {"main": None, "worker 1": 1, "server": None}),
    Way("Trainer, forked", trainer("fork"), {"main": None, "worker 1": 1}),
    Way("two nodes", nodes, {"node 0": None, "node 1": None, "server": None}),
    Way("serve, workers", attached, {"serve": None, "worker 1": 1, "server": None}),
    Way("islands", islands, {"main": None, "worker 1": 1, "worker 3": 3, "server": None}),
    Way("plain loop", loops, {"process 0": None, "process 1": None, "server": None}),
    Way("Ray", on_ray, {"driver": None, "worker 0": 0, "server": None}),
)


def stop(way: Way, role: str, number: int | None, how: str, transport: str) -> tuple[list[str], bool]:
    """Stop one process, then the rest; returns a line of the table, and whether all is as it should be."""
    shm = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="stopping-") as name:
        job, problems = Job(Path(name), transport), list[str]()
        try:
            way.start(job)
            program = job.programs.get(role)
            target = psutil.Process(program.pid) if program else job.server() if number is None else job.worker(number)
            before = {each: len(lines) for each, lines in job.lines.items()}
            begun = time.monotonic()
            target.send_signal(SIGNALS[how])
            code: int | None = None
            ignores = how == "Ctrl-C" and (role == "server" or (way.name == "Ray" and program is None))  # as Ray's do
            with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
                wait_s = 2.0 if ignores else WITHIN_S
                code = program.wait(wait_s) if program else target.wait(wait_s)
            took = time.monotonic() - begun
            time.sleep(1.0)  # what the others say
            new = {each: lines[before[each] :] for each, lines in job.lines.items()}
            said = {each: [line for line in lines if line.strip()] for each, lines in new.items()}
            on = [each for each, one in job.programs.items() if one.poll() is None]
            ended = not target.is_running() or target.status() == psutil.STATUS_ZOMBIE
            if not ended and not ignores:
                problems.append(f"did not end within {WITHIN_S:g} s")
            for each, lines in said.items():
                if len(lines) > LINES:
                    shown = [*lines[:12], "...", *lines[-12:]] if len(lines) > 25 else lines
                    problems.append(f"{each} says {len(lines)} lines:\n    " + "\n    ".join(shown))
        except (AssertionError, psutil.Error, FileNotFoundError) as error:
            problems.append(str(error)[-2000:])
            took, code, said, on, ended = 0.0, None, {}, [], False
        left = job.end()
        problems += [f"left behind: {each}" for each in left]
        time.sleep(0.2)
        problems += [f"left behind: /dev/shm/{each}" for each in set(os.listdir("/dev/shm")) - shm]
        ends = {each: one.returncode for each, one in job.programs.items()}
    lines_said = ", ".join(f"{each} {len(lines)}" for each, lines in said.items() if lines) or "none"
    state = str(code) if code is not None else "ended" if ended else "runs on"
    rest = ", ".join(on) if on else "-"
    line = [way.name, transport, role, how, state, f"{took:.1f}", lines_said, rest, str(ends)]
    for problem in problems:
        CONSOLE.print(f"{way.name}, {transport}, {role}, {how}: {problem}")
    return [*line, "FAIL" if problems else ""], not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ways whose names contain this")
    parser.add_argument("--role", default="", help="roles whose names contain this")
    parser.add_argument("--transport", choices=("rpc", "zmq"), help="one of them only")
    args = parser.parse_args()
    clean_environment()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs ignore Ctrl-C
    table = Table(title="One process is stopped", title_justify="left")
    for heading in (
        "way",
        "transport",
        "process",
        "by",
        "exit code",
        "s",
        "lines",
        "goes on",
        "in the end",
        "",
    ):
        table.add_column(heading)
    good = True
    for way in WAYS:
        for transport in [args.transport] if args.transport else ["rpc", "zmq"]:
            for role, number in way.roles.items():
                for how in SIGNALS:
                    if args.only in way.name and args.role in role:
                        line, fine = stop(way, role, number, how, transport)
                        good &= fine
                        table.add_row(*line)
                        CONSOLE.print("  ".join(line))
    CONSOLE.print(table)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
