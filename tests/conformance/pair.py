"""Ranks in processes of their own that run one case after the other, as a script with many Trainers would."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_asgd import ASGDStrategy
from tests.conformance.lab import WORKERS, Lab, Record
from tests.helpers.ports import free_port

DDP, ASGD, ISLAND = "ddp", "asgd", "island"


@dataclass
class Outcome:
    """What became of a case on one rank."""

    facts: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    error: str = ""  # type and text of what it raised
    trace: str = ""


class Pair:
    """Starts at the first case, and anew after a case that failed.

    Args:
        package: ``pytorch_lightning`` or ``lightning.pytorch``; imported here, so that it is imported once.
        strategy: :data:`DDP`, :data:`ASGD`, or :data:`ISLAND`: all ranks are one island with DDP inside.
        workers: number of ranks.
        **options: of our strategy.
    """

    def __init__(self, package: str, strategy: str, workers: int = WORKERS, **options: Any) -> None:
        self.package, self.strategy, self.workers, self.options = package, strategy, workers, options
        self._pl = importlib.import_module(package)
        self._ranks: list[tuple[Any, Any, Any]] = []

    def run(self, case: Any, folder: Path, deadline_s: float) -> list[Outcome]:
        """Let all ranks run a case.

        Returns:
            what became of it, by rank.

        Raises:
            TimeoutError: a rank did not answer in time; the text holds its output.
        """
        if not self._ranks:
            self._start()
        deadline = time.monotonic() + deadline_s
        for _, pipe, _ in self._ranks:
            pipe.send((case, folder))
        outcomes = []
        for rank, (process, pipe, output) in enumerate(self._ranks):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                output.seek(0)
                text = output.read().decode(errors="replace")[-4000:]
                self.close(kill=True)
                raise TimeoutError(f"{case} on rank {rank} of {self.strategy} took over {deadline_s} s:\n{text}")
            try:
                outcomes.append(pipe.recv())
            except EOFError:
                process.join(1)
                outcomes.append(Outcome(error=f"the process ended with code {process.exitcode}"))
        failed = [bool(outcome.error) for outcome in outcomes]
        if any(failed) and (self.strategy == DDP or not all(failed)):
            self.close()  # what it leaves is not the next case's business; A-SGD that fails everywhere leaves nothing
        return outcomes

    def close(self, *, kill: bool = False) -> None:
        """End the ranks."""
        for process, pipe, _ in self._ranks:
            if kill:
                process.kill()
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process, pipe, output in self._ranks:
            process.join(20)
            pipe.close()
            if process.is_alive():
                process.kill()
                process.join()
            output.close()
        self._ranks = []

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        port = free_port()
        theirs: list[Any] = []
        for rank in range(self.workers):
            mine, its = context.Pipe()
            theirs.append(its)
            output = tempfile.TemporaryFile()  # noqa: SIM115
            arguments = (rank, port, its, theirs[:-1], output)
            self._ranks.append((context.Process(target=self._serve, args=arguments), mine, output))
            self._ranks[-1][0].start()
        for pipe in theirs:
            pipe.close()

    def _serve(self, rank: int, port: int, pipe: Any, strangers: list[Any], output: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
        for stranger in (*strangers, *(end for _, end, _ in self._ranks)):
            stranger.close()  # or nobody would notice the end of another process
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NODE_RANK": "0",
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
        }
        try:
            while (task := pipe.recv()) is not None:
                pipe.send(self._run(rank, *task))
        finally:
            atexit._run_exitfuncs()  # multiprocessing's children skip it
            os._exit(0)

    def _run(self, rank: int, case: Any, folder: Path) -> Outcome:
        import torch

        lab = Lab(self._pl, self._make_strategy, folder, rank, self.strategy == ASGD, self.workers)
        torch.manual_seed(0)
        outcome = Outcome(records=lab.records)
        try:
            outcome.facts = case(lab) or {}
        except BaseException as error:
            outcome.error = f"{type(error).__name__}: {error}"
            outcome.trace = traceback.format_exc()
        return outcome

    def _make_strategy(self, **ddp_options: Any) -> Any:
        if self.strategy == DDP:
            return self._pl.strategies.DDPStrategy(**ddp_options)
        if self.strategy == ISLAND:
            return ASGDStrategy(nsync=4, island=self._pl.strategies.DDPStrategy(**ddp_options), **self.options)
        return ASGDStrategy(nsync=4, **self.options)
