"""The guards of tests/conftest.py notice what they are there for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from multiprocessing.synchronize import SemLock
from pathlib import Path

import psutil
import pytest

from tests.helpers import leaks


def test_a_tidy_block_passes() -> None:
    with leaks.forbidden():
        thread = threading.Thread(target=lambda: None)
        thread.start()


def test_an_environment_variable_is_noticed_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK_CHANGED", "before")
    monkeypatch.setenv("LEAK_REMOVED", "before")

    def leak() -> None:
        os.environ["LEAK_NEW"] = "1"
        os.environ["LEAK_CHANGED"] = "after"
        del os.environ["LEAK_REMOVED"]

    with pytest.raises(AssertionError, match=r"LEAK_CHANGED: 'before' became 'after'.*LEAK_NEW.*LEAK_REMOVED"):
        call_guarded(leak)
    assert "LEAK_NEW" not in os.environ
    assert os.environ["LEAK_CHANGED"] == os.environ["LEAK_REMOVED"] == "before"


@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_is_noticed(daemon: bool) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten", daemon=daemon)
    try:
        with pytest.raises(AssertionError, match="thread forgotten"):
            call_guarded(thread.start)
    finally:
        stop.set()
        thread.join()


def test_a_process_is_noticed_and_ended() -> None:
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-c", "import time; time.sleep(100)"]
    with pytest.raises(AssertionError, match=r"process [0-9]+ .*time.sleep"):
        call_guarded(lambda: started.append(subprocess.Popen(command)))
    assert not psutil.pid_exists(started[0].pid)
    started[0].wait()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory directory on this system")
def test_a_file_in_shared_memory_is_noticed() -> None:
    path = Path("/dev/shm") / f"leak_{uuid.uuid4().hex}"
    try:
        with pytest.raises(AssertionError, match=path.name):
            call_guarded(path.touch)
    finally:
        path.unlink()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory directory on this system")
def test_a_semaphore_of_other_tests_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "other_tests_run", lambda: False)
    own = Path("/dev/shm") / f"sem.{SemLock._make_name()[1:]}"  # type: ignore[attr-defined]
    stranger = Path("/dev/shm") / f"sem.mp-{uuid.uuid4().hex}"  # as of another program
    try:
        with pytest.raises(AssertionError, match=own.name):
            call_guarded(own.touch)
        with pytest.raises(AssertionError, match=stranger.name):
            call_guarded(stranger.touch)
        stranger.unlink()
        monkeypatch.setattr(leaks, "other_tests_run", lambda: True)
        call_guarded(stranger.touch)
    finally:
        own.unlink()
        stranger.unlink()


def call_guarded(function: object) -> None:
    with leaks.forbidden(thread_grace_s=0.05, process_grace_s=0.05):
        function()  # type: ignore[operator]
