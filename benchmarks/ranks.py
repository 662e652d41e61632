"""Ranks of a run, forked from a process that has imported torch and Lightning but not used them.

They are started as an external launcher would start them, on one machine or on the two of :mod:`network`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import psutil
from network import Network
from rich.console import Console
from rich.markup import escape

__all__ = ["Slowness", "clean_environment", "end_all", "free_port", "run_ranks", "servers_of", "told_of_errors"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers


@dataclass
class Slowness:
    """Makes a rank slower, by sleep before each of its steps.

    Attributes:
        times: that it then needs for a step: of CPU time, since under DDP it would else sleep longer for having waited.
        seconds: of sleep besides.
    """

    times: float = 1.0
    seconds: float = 0.0
    _own_s: float = 0.0  # CPU time of the latest step
    _began: float = 0.0

    def before_step(self, *, slow: bool) -> None:
        """A step is about to be computed.

        Args:
            slow: whether this is the rank that is slow.
        """
        pause_s = (self.times - 1) * self._own_s + self.seconds
        if slow and pause_s:
            time.sleep(pause_s)
        self._began = time.thread_time()

    def after_step(self) -> None:
        """It is through."""
        self._own_s = time.thread_time() - self._began


def clean_environment() -> None:
    """Forget what a launcher around this program may have set."""
    names = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in [*os.environ]:
        if name in names or name.startswith(("LIGHTNING_ASGD_", "TORCHELASTIC_", "SLURM_")):
            del os.environ[name]


@contextlib.contextmanager
def told_of_errors(console: Console) -> Iterator[None]:
    """End the program with a line instead of a trace: when it is interrupted, and when a rank has failed."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("\ninterrupted; everything is cleaned up")
        sys.exit(130)
    except RuntimeError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        sys.exit(1)


def servers_of(process: psutil.Process) -> list[psutil.Process]:
    """The servers that a process has started, oldest first: children that run a module of the servers' package."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):
            if any(".server." in word for word in child.cmdline() if word.startswith("lightning_asgd.")):
                found.append(child)
    return sorted(found, key=lambda server: (server.create_time(), server.pid))


def run_ranks(
    jobs: Sequence[Callable[[], dict[str, Any]]],
    seconds: float,
    *,
    launched: bool = True,
    network: Network | None = None,
) -> list[dict[str, Any]]:
    """Run one job per rank, all at once, and return what they return.

    Args:
        jobs: by rank.
        seconds: deadline.
        launched: whether the ranks are those of one Trainer; else each is alone.
        network: two machines to spread them over, by halves.

    Raises:
        RuntimeError: a rank failed or is late; the text holds its last output.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = []
    for rank, job in enumerate(jobs):
        enter: Callable[[], None] = lambda: None  # noqa: E731
        if network is not None and launched:
            enter = partial(network.enter, rank // (len(jobs) // 2))
        reader, writer = context.Pipe(duplex=False)
        output = tempfile.TemporaryFile()  # noqa: SIM115
        environment = _environment(rank, len(jobs), port, network) if launched else {}
        process = context.Process(target=_be, args=(environment, enter, job, writer, output), daemon=True)
        ranks.append((rank, process, reader, writer, output))
    try:
        return _collect(ranks, time.monotonic() + seconds)
    finally:
        for _, process, reader, _, output in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
            reader.close()
            output.close()


def _keep_heap() -> None:
    """Keep freed memory for the next step instead of giving it back to the system, as far as the C library is glibc.

    Else, by the luck of what lies at the heap's end, some processes give back thousands of pages in every step, and get
    them anew, and others none: 27 ms a step or 23, whatever the system, and for as long as the process lives.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that all versions take
        mallopt(_TRIM_THRESHOLD, 1 << 30)


def _be(
    environment: dict[str, str],
    enter: Callable[[], None],
    job: Callable[[], dict[str, Any]],
    answer: Any,
    output: IO[bytes],
) -> None:
    """What a forked rank does first and last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    try:
        enter()
        _keep_heap()
        os.environ.update(environment)
        answer.send(job())
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        atexit._run_exitfuncs()  # multiprocessing's children skip it


def _environment(rank: int, workers: int, port: int, network: Network | None) -> dict[str, str]:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "LOCAL_RANK": str(rank)}
    if network is None:
        return common
    node, local = divmod(rank, workers // 2)
    return {
        **common,
        "MASTER_ADDR": network.addresses[0],
        "NODE_RANK": str(node),
        "LOCAL_RANK": str(local),
        "GLOO_SOCKET_IFNAME": network.interfaces[node],
    }


def _collect(ranks: list[tuple[int, Any, Any, Any, IO[bytes]]], deadline: float) -> list[dict[str, Any]]:
    for _, process, _, writer, _ in ranks:
        process.start()
        writer.close()
    answers = []
    for rank, process, reader, _, output in ranks:
        problem = "is not done in time"
        try:
            if reader.poll(max(0.0, deadline - time.monotonic())):
                answers.append(reader.recv())
                continue
        except EOFError:
            process.join(5)
            problem = f"ended with exit code {process.exitcode}"
        output.seek(0)
        raise RuntimeError(f"Rank {rank} {problem}. Its last output:\n{output.read().decode(errors='replace')[-4000:]}")
    for _, process, _, _, _ in ranks:
        process.join(30)  # servers are stopped meanwhile
    return answers


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def end_all(processes: Iterable[Any]) -> None:
    """End processes of this one, suspended ones too."""
    started = list(processes)
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.terminate()
    for process in started:
        process.join(5)
        process.kill()
        process.join()
