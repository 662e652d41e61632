"""Runs on a Ray cluster of one node, with real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.programs import environment

PROGRAM = Path(__file__).with_name("cluster_program.py")


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    # At Ray's own niceness of 15 its processes hardly run beside other tests.
    about = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    variables = environment(lean=False, MARKER=str(os.getpid()), **about)
    done = subprocess.run([sys.executable, str(PROGRAM)], env=variables, capture_output=True, timeout=560)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return {**found, "errors": done.stderr.decode()}


pytestmark = pytest.mark.timeout(600)


def test_a_killed_worker_is_replaced_and_every_sample_is_trained_once(seen: dict[str, Any]) -> None:
    run = seen["run"]
    assert run["exactly"] == 300
    assert run["processes"] == 3
    assert run["epochs"] == [0, 1]
    assert (run["checkpoints"], run["file"]) == (1, ["checkpoint.ckpt"])


def test_exit_hooks_of_workers_run_unless_they_are_killed(seen: dict[str, Any]) -> None:
    assert seen["run"]["exits"] == 2


def test_a_run_ends_if_what_keeps_its_reports_dies(seen: dict[str, Any]) -> None:
    assert re.match(
        r"ASGDError: The process that keeps what the workers of the run 'run' report has died", seen["no_board"]
    )


def test_its_places_are_free_afterwards(seen: dict[str, Any]) -> None:
    assert seen["run"]["free"] == 4


def test_if_the_cluster_has_no_room_the_error_says_what_it_has(seen: dict[str, Any]) -> None:
    assert re.match(
        r"LaunchError: Within 1 s the cluster had no room for 2 times \{'CPU': 64.*It has 4 CPU.*scaling_config",
        seen["no_room"],
    )


def test_what_the_training_function_raises_is_raised_once_no_worker_is_left(seen: dict[str, Any]) -> None:
    assert re.search(r"ASGDError: No worker .* has finished: 2 have failed.*no such column", seen["raises"], re.DOTALL)


def test_a_trainer_in_a_task_is_worker_0_itself_and_the_others_end_with_it(seen: dict[str, Any]) -> None:
    (drawn,) = seen["task"]["drawn"]  # the same on both
    assert "True" in drawn  # Trainer(deterministic=True)
    assert seen["task"] == {"ranks": ["rank-0", "rank-1"], "first_is_mine": True, "drawn": [drawn], "left": []}


def test_a_run_that_the_program_leaves_does_not_start_another_cluster(seen: dict[str, Any]) -> None:
    assert "current thread is not the main thread" not in seen["errors"]  # in which Ray would be started


def test_no_process_is_left(seen: dict[str, Any]) -> None:
    mine = [p for p in psutil.process_iter() if _marker(p) == str(os.getpid())]
    psutil.wait_procs(mine, timeout=10)
    assert [p.cmdline()[:4] for p in mine if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def _marker(process: psutil.Process) -> str | None:
    try:
        return None if process.pid == os.getpid() else process.environ().get("MARKER")
    except psutil.Error:
        return None
