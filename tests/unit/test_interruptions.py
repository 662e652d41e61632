"""What a program says that a signal, or the end of another process, has ended."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

START = """
import os, signal
from lightning_asgd.core.foundation.errors import ServerLostError, WorkerLostError
from lightning_asgd.core.job.interruptions import Interruptions
interruptions = Interruptions()
"""


def said(program: str, before: str = "") -> tuple[int, list[str]]:
    """The exit code of a program, and what it has written."""
    ended = subprocess.run([sys.executable, "-c", before + START + program], capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stderr.splitlines()


def test_ctrl_c_between_two_batches_ends_a_program_with_one_line() -> None:
    program = """
interruptions.defers = True
os.kill(os.getpid(), signal.SIGINT)
interruptions.raise_now()
"""
    assert said(program) == (-signal.SIGINT, ["KeyboardInterrupt"])


@pytest.mark.parametrize("signals", [1, 2])
def test_a_traceback_tells_where_ctrl_c_has_found_the_programs_own_code(signals: int) -> None:
    """A second Ctrl-C is for a batch that does not end."""
    code, lines = said(f"""
interruptions.defers = {signals == 2}
for _ in range({signals}):
    os.kill(os.getpid(), signal.SIGINT)
""")
    assert code == -signal.SIGINT
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("kind", ["WorkerLostError", "ServerLostError"])
def test_the_loss_of_another_process_is_one_line(kind: str) -> None:
    assert said(f"raise {kind}('it is gone')") == (1, [f"lightning_asgd.core.foundation.errors.{kind}: it is gone"])


def test_other_errors_keep_their_traceback_and_the_programs_hook() -> None:
    hook = """
import sys
sys.excepthook = lambda kind, error, trace: print("mine:", error, trace is not None, file=sys.stderr)
"""
    assert said("raise ValueError('wrong')", hook) == (1, ["mine: wrong True"])
    assert said("raise WorkerLostError('it is gone')", hook) == (1, ["mine: it is gone False"])
    assert said("raise ValueError('wrong')")[1][0] == "Traceback (most recent call last):"


def test_the_error_that_came_first_is_shown() -> None:
    _, lines = said("""
try:
    raise ValueError("wrong")
finally:
    raise ServerLostError("it is gone")
""")
    assert "ValueError: wrong" in lines


def test_an_attribute_of_a_programs_own_error_hides_nothing() -> None:
    _, lines = said("error = ValueError('wrong')\nerror.brief = True\nraise error")
    assert lines[0] == "Traceback (most recent call last):"
