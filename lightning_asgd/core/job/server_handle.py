"""One server process of a job: its start, its last output, its end."""

from __future__ import annotations

import contextlib
import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from pathlib import Path
from typing import IO, Any

from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.server.process import ServerArguments, ServerSettings

_LOG_LINES = 20


class ServerHandle:
    """A server process that this process has started."""

    def __init__(self, index: int, rendezvous: Rendezvous, settings: ServerSettings, *, succeeds: bool) -> None:
        self.index = index
        self.rendezvous = rendezvous
        self.key = f"server/{uuid.uuid4().hex}"
        self._shown = 0  # bytes of its output that were read with `new_output`
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # nameless: nothing is left behind
        host, port = rendezvous.address
        arguments = ServerArguments(
            settings,
            f"server{index}",
            self.key,
            host,
            port,
            os.getpid(),
            succeeds=succeeds,
            server=index,
            path=(*filter(None, sys.path), *_working_folder()),
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lightning_asgd.core.server.process", arguments.to_json()],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env=_server_environment(),
        )
        if self.process.stdin is not None:  # a suspended server does not hold up this process
            os.set_blocking(self.process.stdin.fileno(), False)

    def report_exit(self, **report: Any) -> None:
        """Tell the server that a worker's process has ended."""
        self._send(report)

    def report_refused(self, worker: int, why: str) -> None:
        """Report a worker that could not join."""
        self._send({"refused": worker, "why": why})

    def extend_lease(self, until: float) -> None:
        """Have the server end by itself at this time of ``time.monotonic()``, which all processes here share."""
        self._send({"lease_until": until})

    def _send(self, line: dict[str, Any]) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # the server is gone too, or has read nothing for minutes
                os.write(self.process.stdin.fileno(), json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Close the pipes of a server that has ended."""
        self.output.close()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def new_output(self) -> str:
        """The whole lines that it has written since the last time."""
        lines, end, _ = os.pread(self.output.fileno(), 1 << 20, self._shown).rpartition(b"\n")
        self._shown += len(lines + end)
        return (lines + end).decode(errors="replace")

    def last_output(self) -> str:
        """Its last lines."""
        size = os.fstat(self.output.fileno()).st_size
        # Several threads may read at once, each at a position of its own.
        lines = os.pread(self.output.fileno(), 16384, max(0, size - 16384)).decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:]) or "(no output)"

    def exit_report(self) -> str:
        """How it ended; with its last output, unless it was asked to end."""
        code = self.process.returncode
        output = f" Its last output was:\n{self.last_output()}" if code else ""
        return f"Server {self.index} (process {self.process.pid}) ended with exit code {code}.{output}"


def child_environment() -> dict[str, str]:
    """The environment of a process that must import this package, and nothing from its working directory."""
    root = str(Path(__file__).resolve().parents[3])
    path = [each for each in (root, os.environ.get("PYTHONPATH")) if each]
    if root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}:
        del path[0]  # found there anyway, and behind the standard library, parts of which other packages may replace
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _working_folder() -> list[str]:
    try:
        return [os.getcwd()]
    except OSError:  # it was removed
        return []


def _server_environment() -> dict[str, Any]:
    # A server needs one core and no accelerator. Huge pages make the fresh memory of each message cheap.
    return {
        "THP_MEM_ALLOC_ENABLE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # RPC warns of every worker that leaves
        **child_environment(),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
