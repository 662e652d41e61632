"""Server processes as the supervisor starts them, one by one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from unittest import mock

import psutil

import lightning_asgd
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.job.addresses import LOOPBACK, interface_of
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.server.process import ServerArguments, ServerSettings

START_S = 50.0
FORKED = "server_process"  # the name that tests/helpers/lean gives a forked one
SECRET = "known to the tests alone"
ROOT = str(Path(lightning_asgd.__file__).resolve().parent.parent)


class ServerProcess:
    """Starts at once; :meth:`address` waits until it serves."""

    def __init__(self, rendezvous: Rendezvous, name: str, transport: str = "rpc", run: str = "") -> None:
        self.name = name
        self._host = rendezvous  # the store lives as long
        with mock.patch.dict(os.environ, {SECRET_ENV: SECRET}):  # an earlier job of this process may have made another
            self._rendezvous = Rendezvous.connect(*rendezvous.address, START_S)
        self._key = f"server/{uuid.uuid4().hex}"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        host, port = rendezvous.address
        interface = interface_of(LOOPBACK)
        settings = ServerSettings(interface, transport, run=run)
        arguments = ServerArguments(settings, name, self._key, host, port, os.getpid())
        path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "lightning_asgd.core.server.process", arguments.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", SECRET_ENV: SECRET},
        )

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.popen.pid)

    def address(self) -> str:
        answer = self._rendezvous.get(self._key, self.name, START_S, self._check)
        assert answer["pid"] == self.popen.pid
        return str(answer["address"])

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(5)
        self._output.close()

    def _check(self) -> None:
        assert self.popen.poll() is None, f"{self.name} ended with code {self.popen.returncode}:\n{self.output()}"


def servers_of(pid: int) -> list[psutil.Process]:
    """The servers that a process has started; those that are kept ready come last."""
    found = []
    # By age: after thousands of processes their numbers begin again, and a younger one may have the lower number.
    for process in sorted(psutil.Process(pid).children(), key=psutil.Process.create_time):
        with contextlib.suppress(psutil.Error):  # the process has ended
            if process.name() == FORKED or "lightning_asgd.core.server.process" in process.cmdline():
                found.append(process)
    return found
