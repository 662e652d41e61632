"""Whose the rank variables are: of workers, of programs that they start, and of those that other launchers start."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from typing import Any

import pytest

from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.job.rank_variables import OWNER_ENV, RANK_VARIABLES, RENDEZVOUS_ENV

VARIABLES = (*RANK_VARIABLES, "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
MINE = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1234"}
SHOW = "import lightning_asgd, json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(autouse=True)
def _unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, OWNER_ENV, RENDEZVOUS_ENV):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a process's own, for a test
    monkeypatch.setattr(rank_variables, "_address", None)


def program(command: tuple[str, ...] = (sys.executable, "-c", SHOW), **variables: str) -> dict[str, str]:
    """The rank variables of a program that is started now, after it has imported the package."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)
    return {name: found[name] for name in (*VARIABLES, OWNER_ENV, RENDEZVOUS_ENV) if name in found}


def test_a_program_that_a_worker_starts_is_none() -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # the user's
    with rank_variables.owning():
        os.environ.update(MINE)
    assert program() == {"MASTER_ADDR": "127.0.0.1"}
    del os.environ["WORLD_SIZE"]  # as Lightning does when a fit is over
    assert program() == {"MASTER_ADDR": "127.0.0.1"}


def test_what_others_have_set_stays() -> None:
    os.environ.update(MINE)  # torchrun's
    with rank_variables.owning():
        os.environ["LOCAL_RANK"] = "0"
        os.environ["GLOBAL_RANK"] = "0"
    assert program() == MINE


def test_a_program_that_another_launcher_starts_keeps_what_that_has_set() -> None:
    with rank_variables.owning():
        os.environ.update(MINE)
    assert program(LOCAL_RANK="0", WORLD_SIZE="4", MASTER_PORT="4321") == {
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_PORT": "4321",
    }


def test_a_program_that_torchrun_starts_with_equal_values_keeps_them() -> None:
    """Worker 0 starts it, and it is rank 0 there too; torchrun says in GROUP_RANK on which machine it is."""
    mine = {name: value for name, value in MINE.items() if name != "MASTER_PORT"}
    with rank_variables.owning():
        os.environ.update(mine)
    assert program(**mine, GROUP_RANK="0") == {**mine, "GROUP_RANK": "0"}


def test_what_torchrun_gave_a_worker_stays_in_its_programs() -> None:
    os.environ.update(RANK="1", GROUP_RANK="1")
    with rank_variables.owning():
        os.environ["NODE_RANK"] = "1"
    assert program() == {"RANK": "1", "GROUP_RANK": "1"}


def test_a_forked_process_does_not_take_the_workers_parent_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_variables, "_main", os.getppid())  # as in a worker that the launcher has started

    def show() -> None:
        before = rank_variables.main_process()
        rank_variables.note_main(os.getppid())  # as the launcher does in a worker that it forks
        queue.put((before, rank_variables.main_process()))

    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(target=show)
    child.start()
    child.join(20)
    assert queue.get() == (None, os.getpid())
    assert rank_variables.main_process() == os.getppid()


def test_variables_that_are_set_later_are_owned_too() -> None:
    with rank_variables.owning():
        os.environ["LOCAL_RANK"] = "1"
    with rank_variables.owning():
        os.environ.update(LOCAL_RANK="1", RANK="1")
    assert program() == {}


def test_a_launched_worker_keeps_its_variables_and_its_own_programs_have_none() -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    rank_variables.keep_address("127.0.0.1:5678")
    with rank_variables.launching("/loaders"):
        os.environ.update(MINE)
        children = dict(os.environ)
    assert RENDEZVOUS_ENV not in os.environ
    show = "import sys, lightning_asgd, subprocess; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    address = "from lightning_asgd.core.job import rank_variables; print(repr(rank_variables.address()))"
    os.environ.update(children)
    worker = program(LOCAL_RANK="1")
    note = json.loads(worker.pop(OWNER_ENV))
    assert worker == {**MINE, "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    assert note["variables"] == {**MINE, "LOCAL_RANK": "1"}
    assert note["address"] == "127.0.0.1:5678"
    assert program((sys.executable, "-c", show, SHOW), LOCAL_RANK="1") == {"MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", address], env=os.environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "'127.0.0.1:5678'\n"


def test_a_worker_that_replaces_its_program_stays_the_worker() -> None:
    again = f"import os, sys, lightning_asgd; os.execv(sys.executable, [sys.executable, '-c', {SHOW!r}])"
    rank_variables.keep_address("127.0.0.1:5678")
    with rank_variables.launching("/loaders"):
        os.environ.update(MINE)
        os.environ.update(dict(os.environ))
        worker = program((sys.executable, "-c", again))
    assert json.loads(worker.pop(OWNER_ENV))["address"] == "127.0.0.1:5678"
    assert worker == MINE


METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The rank variables in processes of data loaders, by how these are started: of one worker, which imports torch."""
    script = f"""
import json, os, sys, multiprocessing, torch
from lightning_asgd.core.job import rank_variables
from torch.utils.data import DataLoader, Dataset
class Ranks(Dataset):
    def __len__(self): return 1
    def __getitem__(self, index):
        import lightning_asgd
        return [os.environ.get(name) for name in ("LOCAL_RANK", "RANK")]
if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["lightning_asgd"])
    with rank_variables.owning():
        os.environ.update(LOCAL_RANK="1", RANK="1")
    loaders = {{
        method: DataLoader(Ranks(), num_workers=1, multiprocessing_context=method, collate_fn=list)
        for method in {METHODS!r}
    }}
    print(json.dumps({{method: list(loader) for method, loader in loaders.items()}}))
"""
    file = tmp_path_factory.mktemp("loaders") / "script.py"
    file.write_text(script)
    clean = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, OWNER_ENV, RENDEZVOUS_ENV)}
    done = subprocess.run(
        [sys.executable, str(file)], env=clean, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("method", METHODS)
def test_the_processes_of_a_dataloader_keep_the_workers_rank(found: dict[str, Any], method: str) -> None:
    assert found[method] == [[["1", "1"]]]
