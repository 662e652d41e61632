"""What the supervisor does between fits, and what it adds to errors."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lightning_asgd
from lightning_asgd.core.algorithms.config import SECRET_ENV
from lightning_asgd.core.calls.inprocess import InProcessTransport
from lightning_asgd.core.foundation.errors import LaunchError, ServerLostError
from lightning_asgd.core.job import registry, supervisor
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.job.server_handle import child_environment
from lightning_asgd.core.job.supervisor import Supervisor, with_last_output
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.core.worker.connection import Connection
from tests.helpers.servers import SECRET

NO_PROCESS = 1 << 30  # above all process numbers


class Overseer:
    """A supervisor, as far as errors are concerned."""

    def __init__(self, exit_report: str | None) -> None:
        self._exit_report = exit_report

    def exit_report(self) -> str | None:
        return self._exit_report


@pytest.mark.parametrize(("words", "text"), [("Server 0 ended.", "No answer.\nServer 0 ended."), (None, "No answer.")])
def test_a_dead_servers_output_is_added_once(monkeypatch: pytest.MonkeyPatch, words: str | None, text: str) -> None:
    monkeypatch.setattr(supervisor, "_current", Overseer(words))
    assert with_last_output("No answer.") == text
    assert with_last_output(text) == text


def connected(error: Exception) -> Connection:
    """A connection on which every message fails."""

    def fail(message: Any) -> Any:
        raise error

    return Connection(InProcessTransport([fail]), "s", 0, 1, with_last_output=with_last_output)


def test_errors_of_a_lost_server_hold_its_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_current", Overseer("Server 0 ended."))
    with pytest.raises(ServerLostError, match=r"^Server 0 is lost: .*'eof'[^\n]*\nServer 0 ended\.$"):
        connected(RuntimeError("eof")).post(0, None)


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_current", Overseer("Server 0 ended."))
    with pytest.raises(ValueError, match=r"^of the program$"):
        connected(ValueError("of the program")).post(0, None)


@pytest.fixture
def overseer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """With one server, and another one kept ready at once."""
    monkeypatch.setattr(supervisor, "_STANDBY_AFTER_S", 0.0)
    monkeypatch.setattr(supervisor, "_POLL_S", 0.02)
    made = Supervisor(Rendezvous.host())
    made.start()
    made.hot_standby = True
    made.add_servers(1)
    yield made
    made.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_no_server_is_kept_ready_between_fits(overseer: Supervisor) -> None:
    wait_until(lambda: overseer._standby is not None)
    standby = overseer._standby
    assert standby is not None
    overseer.rest()
    wait_until(lambda: standby.process.poll() is not None)
    wait_until(lambda: overseer._standby is None)
    assert overseer.healthy


def test_of_a_server_that_was_replaced_the_next_fit_hears_nothing(overseer: Supervisor) -> None:
    wait_until(lambda: overseer._standby is not None)
    (killed,) = overseer._servers
    overseer.rendezvous.put(killed.key, "an address")  # type: ignore[union-attr]  # else it counts as failed at start-up
    killed.process.kill()
    wait_until(lambda: overseer.exit_report() is not None and overseer.healthy)
    overseer.rest()
    assert overseer.exit_report() is None


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
@pytest.mark.parametrize("character", ["x", "\ufffd", "\U0001f600", "\0"], ids=ascii)
def test_workers_learn_why_a_server_is_not_replaced_however_much_it_wrote(
    monkeypatch: pytest.MonkeyPatch, transport: str, character: str
) -> None:
    monkeypatch.setenv(SECRET_ENV, SECRET)
    why = "Server 0 ended with exit code 1. Its last output was:\n" + 16384 * character + "\nImportError: no torch"
    with registry.kind_of(transport).host_rendezvous() as rendezvous:
        server: Any = SimpleNamespace(rendezvous=rendezvous, key="server/0")
        Supervisor(rendezvous)._give_up(server, why)
        with pytest.raises(LaunchError, match="no torch") as caught:
            rendezvous.peek_server("server/0")
    assert str(caught.value).startswith("Server 0 ended with exit code 1. Its last output was:\n")
    assert f"{1000 * character}\nImportError: no torch\nExpected it to start." in str(caught.value)


def test_servers_find_this_package_wherever_they_start() -> None:
    first = child_environment()["PYTHONPATH"].split(os.pathsep)[0]
    assert Path(lightning_asgd.__file__).parent.parent == Path(first)


def test_installed_packages_are_not_found_before_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    root = str(Path(lightning_asgd.__file__).resolve().parent.parent)
    assert child_environment()["PYTHONPATH"] == os.pathsep.join([root, "/mine"])
    monkeypatch.setattr("sysconfig.get_path", lambda _: root)
    assert child_environment()["PYTHONPATH"] == "/mine"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == ""


def test_one_that_watches_workers_serves_when_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_current", None)
    watch = supervisor.ensure_watch()
    watch._workers[3] = SimpleNamespace(pid=os.getpid(), poll=lambda: None)  # type: ignore[assignment]
    try:
        with Rendezvous.host() as rendezvous:
            serving = supervisor.ensure(0, rendezvous, ServerSettings("lo", job="j", snapshot_every_s=1.0))
            assert serving is watch
            assert list(serving._workers) == [3], "it watches them as before"
            assert (serving.rendezvous, serving.settings.job) == (rendezvous, "j")
            assert Path(str(serving._private)).is_dir()
    finally:
        watch._workers.clear()
        watch.close()
    assert not Path(str(watch._private)).exists()


def test_a_later_fit_with_other_settings_knows_the_workers_and_leaves_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_current", None)
    told: list[int] = []
    server: Any = SimpleNamespace(key="server/0", process=SimpleNamespace(pid=NO_PROCESS, poll=lambda: None))
    server.report_exit = lambda **exited: told.append(exited["worker"])
    monkeypatch.setattr(Supervisor, "_new_server", lambda *args, **options: server)
    monkeypatch.setattr(Supervisor, "_end", lambda *args: None)
    called: list[int] = []
    alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with Rendezvous.host() as rendezvous:
        first = supervisor.ensure(0, rendezvous, ServerSettings("lo", job="j"))
        dead: Any = SimpleNamespace(pid=NO_PROCESS, poll=lambda: 1)
        first._workers[1] = dead
        first.add_worker(2, alive)
        first.excuse(1)
        first.on_worker_exit(lambda rank, *_: called.append(rank))
        wait_until(lambda: called == [1])
        first.on_worker_exit(None)
        second = supervisor.ensure(1, rendezvous, ServerSettings("lo", job="j", snapshot_every_s=9.0))
        try:
            assert second is not first
            del first
            gc.collect()
            assert told == [1]
            second.on_worker_exit(lambda rank, *_: called.append(rank))
            second._look()
            assert called == [1], "its end is known already"
            with pytest.raises(subprocess.TimeoutExpired):
                alive.wait(5.0)  # a reaper would have ended it by now
        finally:
            alive.kill()
            alive.wait()
            assert second.failures() == {2: -signal.SIGKILL}
            second._servers.clear()
            second.close()


def test_a_server_that_ended_with_its_lease_is_replaced_once_the_lease_is_extended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, replaced = 100.0, list[Any]()
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now)
    overseer = Supervisor(None)
    server = SimpleNamespace(key="server/1", process=SimpleNamespace(poll=lambda: 1), extend_lease=lambda until: None)
    overseer._servers = [server]  # type: ignore[list-item]
    monkeypatch.setattr(overseer, "_replace", replaced.append)
    overseer.extend_lease(99.0)
    overseer._look()
    assert replaced == []
    overseer.extend_lease(101.0)
    overseer._look()
    overseer._look()
    assert replaced == [server]
