"""An elastic run that a job hosts for itself: one Trainer's islands attach to it as those of several Trainers would."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from lightning_asgd.core.foundation.environment import joined
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job import address as job_address
from lightning_asgd.core.job import rank_variables, supervisor
from lightning_asgd.core.job import secret as job_secret
from lightning_asgd.core.job.address import Surroundings
from lightning_asgd.core.job.addresses import LOOPBACK, listens, resolve
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.job.server_handle import child_environment
from lightning_asgd.core.server.process import QUIET_ENV

_POLL_S = 0.1
_runs = itertools.count()
_STOP_S = 10.0
_COMMAND = "from lightning_asgd.cli.command_line import main; raise SystemExit(main())"


class HostedRun:
    """The run of one call of a Trainer. The job's main process starts ``lightning-asgd serve`` for it.

    ``patience_s`` is how long to wait for an island that prepares its data. ``fits``, whether the next call trains, is
    set before :meth:`begin`: else nothing is started.
    """

    def __init__(self, num_servers: int, transport: str, start_timeout_s: float, patience_s: float) -> None:
        self.fits = self.is_main = False
        self.transport = self.why = ""
        self._number = next(_runs)  # equal in all processes of the job, which run the same program
        self._num_servers, self._asked = num_servers, transport
        self._start_timeout_s, self.patience_s = start_timeout_s, patience_s
        self._calls = 0
        self._address: tuple[str, int] | None = None
        self._served: tuple[str, int, str] | None = None  # where this process serves the run, and its name
        self._process: subprocess.Popen[bytes] | None = None
        self._restore_secret: Callable[[], None] | None = None  # takes the job's secret for its own again

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {**vars(self), "_process": None, "_restore_secret": None}

    def begin(self, place: Surroundings, say: Callable[[str], None], *, is_main: bool) -> None:
        """Find or host the rendezvous; in the main process, start the servers of a call that trains."""
        one_machine = place.num_nodes == 1 and (rank_variables.address() is not None or not place.external)
        self.transport, self.why, kind = job_address.choose_transport(
            self._asked, one_machine=one_machine, say=say if is_main else None
        )
        kind.provide_secret(one_machine=one_machine)
        self._restore_secret = job_secret.treat_as_given()  # the run's servers and their workers see a run of others
        self._address = job_address.find_address(kind, place, is_main=is_main)
        self.is_main, self._calls = is_main, self._calls + 1
        if is_main and self.fits:
            spans = place.num_nodes > 1 or place.foreign
            self._serve(self._address[0] if spans else LOOPBACK)

    def _serve(self, host: str) -> None:
        overseer, run = supervisor.ensure_watch(), secrets.token_hex(4)
        port = free_port(resolve(host))
        about = f"{joined(host, port)}/{run}", f"--num-servers={self._num_servers}", f"--transport={self.transport}"
        environment = child_environment()
        path = [*filter(None, [environment["PYTHONPATH"], *sys.path]), os.getcwd()]  # an algorithm may be a user's own
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, "serve", *about],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": os.pathsep.join(path), QUIET_ENV: "1"},  # the chief logs the events
            start_new_session=True,  # Ctrl-C ends it after the islands have left
        )
        overseer.register(self._process.pid)
        self._served = host, port, run

    def find(self) -> tuple[tuple[str, int], str]:
        """Wait for the servers. Returns the run's address and its name."""
        if self._served is not None:
            self._await_servers(*self._served[:2])
            self.tell("run", list(self._served))
        host, port, run = self.ask("run", "The main process")
        return (str(host), int(port)), str(run)

    def _await_servers(self, host: str, port: int) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            there, code = listens(host, port), None if self._process is None else self._process.poll()
            if code is not None:
                raise LaunchError(
                    f"`lightning-asgd serve`, which the main process has started at {host}:{port} for its islands, "
                    f"ended with exit code {code}. Expected it to serve. Its output above says why."
                )
            if there:
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"`lightning-asgd serve`, which the main process has started at {host}:{port} for its islands, did "
                    f"not listen within {self._start_timeout_s:g} s. Expected it to. Raise Timeouts(start_s=...)."
                )
            time.sleep(_POLL_S)

    def end(self) -> None:
        """The call is over: stop the servers, if this process has started them."""
        if self._restore_secret is not None:
            self._restore_secret()
            self._restore_secret = None
        process, self._process, self._served = self._process, None, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # ------------------------------------------------------------------ what the job's processes say to each other

    def tell(self, what: str, value: Any) -> None:
        """Let the job's other processes know something about this call."""
        with self._rendezvous() as rendezvous:
            rendezvous.put(self._key(what), value)

    def ask(self, what: str, who: str, timeout_s: float | None = None) -> Any:
        """Wait until a process has told it."""
        with self._rendezvous() as rendezvous:
            return rendezvous.get(self._key(what), who, timeout_s or self._start_timeout_s)

    def _key(self, what: str) -> str:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the rendezvous over its restarts
        return f"islands/{attempt}.{self._number}.{self._calls}/{what}"

    def _rendezvous(self) -> Rendezvous:
        if self._address is None:
            raise LaunchError("The strategy was not launched by a Trainer. Expected Trainer(strategy=...).fit(...).")
        return Rendezvous.connect(*self._address, self._start_timeout_s, transport=self.transport)


def free_port(host: str) -> int:
    """A port of this machine that no process listens at now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])
