"""The exit code of a script whose workers have failed, in processes that import little."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_asgd.core.job.exit_code import failures


def script(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("worker", "code"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_script_ends_with_the_code_of_a_worker_that_failed_and_all_else_is_done_before(
    worker: str, code: int
) -> None:
    done = script(f"""
import atexit, subprocess, sys, threading
atexit.register(print, "registered before")
from lightning_asgd.core.job import exit_code
workers = {{1: subprocess.Popen([sys.executable, "-c", {worker!r}])}}
atexit.register(lambda: exit_code.exit_with(exit_code.failures(workers)))
atexit.register(print, "registered after")
threading.Thread(target=print, args=["a thread"]).start()
class Kept:
    def __del__(self):
        sys.stdout.write("forgotten\\n")
kept = Kept()
sys.stdout.write("no newline at the end")
""")
    assert done.returncode == code, done.stderr
    assert done.stdout.count("registered before") == done.stdout.count("registered after") == 1
    assert "no newline at the end" in done.stdout
    assert f"Worker 1 ended with exit code {3 if code == 3 else -9}" in done.stderr
    assert f"this process ends with exit code {code}." in done.stderr


def test_an_exception_of_the_script_is_noticed() -> None:
    done = script("""
import atexit
from lightning_asgd.core.job import exit_code
atexit.register(lambda: print(exit_code.is_failing()))
1 / 0
""")
    assert (done.returncode, done.stdout) == (1, "True\n")
    assert script("from lightning_asgd.core.job import exit_code; print(exit_code.is_failing())").stdout == "False\n"


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as made:
        yield made
        made.kill()


def test_a_worker_that_hangs_is_waited_for_and_then_left(caplog: pytest.LogCaptureFixture) -> None:
    with process("input()") as hangs, process("exit(0)") as good, process("exit(2)") as bad:
        bad.wait(30)
        begun = time.monotonic()
        assert failures({1: hangs, 2: good, 3: bad}, wait_s=0.3) == {1: -signal.SIGKILL, 3: 2}  # it will be killed
        assert time.monotonic() - begun > 0.3
        assert hangs.poll() is None
    assert f"Worker 1 (process {hangs.pid}) is still running after 0.3 s" in caplog.text


def test_a_worker_that_takes_its_time_is_waited_for() -> None:
    with process("import time; time.sleep(0.5); exit(5)") as slow:
        assert failures({1: slow}) == {1: 5}
