"""The reaper in real processes. One parent is killed for most of the tests, so that its patience is paid for once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_asgd.core.job import reaper as reaper_module
from lightning_asgd.core.job.reaper import start, started

# Starts the reaper and some children, says their numbers, then waits for its end.
PARENT = """
import json, os, subprocess, sys, time
from lightning_asgd.core.job.reaper import start, started
reaper = start()
pids = {"reaper": reaper.pid}
children = {
    "stubborn": "import signal, sys, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]",
    "polite": "import sys, time",
    "bystander": "import sys, time",
    "reused": "import sys, time",
}
for name, start in children.items():
    code = start + "; print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child.stdout.readline()
    pids[name] = child.pid
    if name != "bystander":
        reaper.stdin.write(f"add {child.pid} {started(os.getpid() if name == 'reused' else child.pid)}\\n".encode())
reaper.stdin.flush()
print(json.dumps(pids), flush=True)
sys.stdin.read()
"""


@dataclass
class Family:
    parent: subprocess.Popen[bytes]
    members: dict[str, psutil.Process]

    def kill(self) -> None:
        for process in (*self.members.values(), self.parent):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.parent.communicate(timeout=5)


def family() -> Family:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = json.loads(parent.stdout.readline())
    return Family(parent, {name: psutil.Process(pid) for name, pid in pids.items()})


def gone(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


def start_patient() -> subprocess.Popen[bytes]:
    """Start a reaper of this process that gives others 120 s to end: what happens within 30 s is none of that."""
    code = "from lightning_asgd.core.job import reaper; reaper._PATIENCE_S = 120; reaper.reap()"
    return subprocess.Popen([sys.executable, "-c", code, str(os.getpid())], stdin=subprocess.PIPE)


def seconds_until_gone(process: psutil.Process, limit: float) -> float:
    begun = time.monotonic()
    while not gone(process):
        if time.monotonic() - begun > limit:
            return float("inf")
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0.05)
    return time.monotonic() - begun


@pytest.fixture(scope="module")
def aftermath() -> dict[str, Any]:
    """Which processes were left after a parent was killed, and which after its reaper was only asked to end."""
    killed = family()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        killed.members["reaper"].send_signal(signum)
    time.sleep(0.6)  # two polls
    shrugged = not gone(killed.members["reaper"])
    early = not gone(killed.members["stubborn"])
    killed.parent.kill()
    killed.parent.wait(20)
    begun = time.monotonic()
    took = {name: seconds_until_gone(killed.members[name], 30.0) for name in ("polite", "stubborn", "reaper")}
    total = time.monotonic() - begun
    left = {name for name, process in killed.members.items() if not gone(process)}
    killed.kill()
    return {"shrugged": shrugged, "early": early, "took": took, "total": total, "left": left}


def test_the_reaper_ignores_the_signals_of_a_terminal(aftermath: dict[str, Any]) -> None:
    assert aftermath["shrugged"]


def test_nobody_is_touched_while_the_parent_lives(aftermath: dict[str, Any]) -> None:
    assert aftermath["early"]


def test_a_stubborn_child_of_a_killed_parent_is_gone_within_8_seconds(aftermath: dict[str, Any]) -> None:
    assert "stubborn" not in aftermath["left"]
    assert aftermath["total"] <= 30.0  # a busy machine may add seconds to what the reaper waits itself
    reaper = reaper_module
    assert reaper._POLL_S + reaper._PATIENCE_S + reaper._GRACE_S + reaper._KILLED_S <= 8.0


def test_a_polite_child_need_not_be_killed(aftermath: dict[str, Any]) -> None:
    assert aftermath["took"]["polite"] < aftermath["total"]
    assert "polite" not in aftermath["left"]


def test_the_reaper_goes_too(aftermath: dict[str, Any]) -> None:
    assert "reaper" not in aftermath["left"]


def test_processes_that_were_not_registered_live_on(aftermath: dict[str, Any]) -> None:
    assert "bystander" in aftermath["left"]


def test_a_process_number_given_to_another_program_is_left_alone(aftermath: dict[str, Any]) -> None:
    assert "reused" in aftermath["left"]


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_while_a_job_runs_changes_nothing(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """The time of day at which a process started is computed from the present one, so it moves with the clock."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        watched, before = {child.pid: started(child.pid)}, psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: before(process) + step_s)
        alive = [process.pid for process in reaper_module._alive(watched)]
        child.communicate(b"\n", timeout=10)
    assert alive == [child.pid]


def test_a_number_whose_new_owner_seems_as_old_as_the_one_before_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the clock was set back between the two starts."""
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1e9)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        alive = reaper_module._alive({child.pid: started(os.getpid())})
        child.communicate(b"\n", timeout=10)
    assert alive == []


def test_signals_that_come_before_the_reaper_is_ready_do_not_end_it() -> None:
    reaper = start()
    for _ in range(20):
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            reaper.send_signal(signum)
        with pytest.raises(subprocess.TimeoutExpired):
            reaper.wait(0.02)
    assert reaper.stdin is not None
    reaper.stdin.close()
    assert reaper.wait(20) == 0


def test_the_reaper_ends_at_once_when_its_input_does_and_nobody_is_left() -> None:
    reaper = start_patient()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    since = started(child.pid)
    child.wait(10)
    assert reaper.stdin is not None
    reaper.stdin.write(f"add {child.pid} {since}\n".encode())
    reaper.stdin.close()
    assert reaper.wait(30) == 0  # less than the patience it has with the living


def test_children_that_end_by_themselves_get_the_time_to() -> None:
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); print(1, flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    reaper = start_patient()
    assert reaper.stdin is not None
    reaper.stdin.write(f"add {child.pid} {started(child.pid)}\n".encode())
    reaper.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    assert reaper_module._PATIENCE_S > 0.5  # of others than this one
    child.stdin.close()
    child.stdout.close()
    assert child.wait(20) == 0
    assert reaper.wait(20) == 0


def test_folders_go_with_the_parent(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "server0.pt").touch()
    reaper = start()
    assert reaper.stdin is not None
    reaper.stdin.write(f"remove {tmp_path / 'a folder'}\nremove {tmp_path / 'none'}\n".encode())
    reaper.stdin.close()
    assert reaper.wait(20) == 0
    assert list(tmp_path.iterdir()) == []


def test_folders_stay_while_the_parent_needs_them(tmp_path: Path) -> None:
    reaper = start()
    reaper.communicate(f"remove {tmp_path}\nkeep\n".encode(), 20)
    assert reaper.returncode == 0
    assert tmp_path.is_dir()


def test_a_reaper_whose_parent_is_gone_already_ends() -> None:
    command = [sys.executable, "-m", "lightning_asgd.core.job.reaper", str(2**22 + 1)]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert reaper.wait(20) == 0
    assert reaper.stdin is not None
    reaper.stdin.close()


def test_what_kills_the_parent_s_whole_group_does_not_keep_it_from_tidying_up(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    code = """
import os, sys, time
from lightning_asgd.core.job.reaper import start
reaper = start()
reaper.stdin.write(f"remove {sys.argv[1]}\\n".encode())
reaper.stdin.flush()
print(reaper.pid, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "a folder")]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    reaper = psutil.Process(int(parent.stdout.readline()))
    parent.stdout.close()
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait(20)
    assert seconds_until_gone(reaper, 5.0) < 5.0
    assert not (tmp_path / "a folder").exists()
