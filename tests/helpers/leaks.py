"""Notices what a test leaves behind: environment variables, threads, processes, files in shared memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

THREAD_GRACE_S = 2.0
PROCESS_GRACE_S = 5.0

_VARIABLES = {
    "PYTEST_CURRENT_TEST",  # pytest's own, changes with every phase of a test
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # torch and its compiler set these when they are first used
    "RAY_CLIENT_MODE",  # Ray sets it when it is imported
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
}
_THREADS = ("pytest_timeout", "pytest-timeout", "pydevd")  # beginnings of names
FILES_FACTOR = 10  # how much longer than for a thread to wait for a file
_SHM = Path("/dev/shm")

# Semaphores do not say whose they are, and those of a killed process stay for a while. Other tests run meanwhile.
# This process and those that multiprocessing starts have their own prefix. A program that a test runs has Python's.
_SEMAPHORES = ("sem.mp-", f"sem.mp{os.getpid()}-")
multiprocessing.current_process()._config["semprefix"] = f"/mp{os.getpid()}"  # type: ignore[attr-defined]


@dataclass
class Snapshot:
    environment: dict[str, str]
    threads: set[threading.Thread]
    processes: set[int]
    files: set[str]


def take() -> Snapshot:
    return Snapshot(_environment(), set(threading.enumerate()), _children(), _files())


@contextlib.contextmanager
def forbidden(thread_grace_s: float = THREAD_GRACE_S, process_grace_s: float = PROCESS_GRACE_S) -> Iterator[None]:
    """Raise AssertionError at the end if the block left something behind; put right what can be put right."""
    before = take()
    yield
    problems = [
        *_check_environment(before.environment),
        *_check_threads(before.threads, thread_grace_s),
        *_check_processes(before.processes, process_grace_s),
        *_check_files(before.files, FILES_FACTOR * thread_grace_s),
    ]
    if problems:
        raise AssertionError("The test left something behind: " + "; ".join(problems))


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in _VARIABLES}


def _check_environment(before: dict[str, str]) -> list[str]:
    after = _environment()
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}: {before.get(name)!r} became {after.get(name)!r}" for name in changed]


def _check_threads(before: set[threading.Thread], grace_s: float) -> list[str]:
    deadline = time.monotonic() + grace_s
    while left := [t for t in threading.enumerate() if t not in before and not _is_foreign(t)]:
        if time.monotonic() >= deadline:
            return [f"thread {t.name}" for t in left]
        left[0].join(0.02)
    return []


def _is_foreign(thread: threading.Thread) -> bool:
    # Python makes a dummy for a thread of C++ that once called back; pyzmq keeps one for memory that was being sent.
    foreign = isinstance(thread, threading._DummyThread) or type(thread).__module__.startswith("zmq.")
    return foreign or thread.name.startswith(_THREADS)


def _children() -> set[int]:
    """Process numbers of all descendants; through the kernel's own lists where it has them, which is quicker."""
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        except OSError:  # it ended meanwhile
            continue
        if not lists and pid == os.getpid():
            return {p.pid for p in psutil.Process().children(recursive=True)}
        new = {int(child) for text in lists for child in text.split()} - found
        found |= new
        todo += new
    return found


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _check_processes(before: set[int], grace_s: float) -> list[str]:
    new = []
    for pid in _children() - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            new.append(psutil.Process(pid))
    _, left = psutil.wait_procs(filter(_runs, new), timeout=grace_s)
    problems = []
    for process in filter(_runs, left):
        with contextlib.suppress(psutil.Error):
            problems.append(f"process {process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
    psutil.wait_procs(left, timeout=1.0)
    return problems


def _files() -> set[str]:
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def _check_files(before: set[str], grace_s: float) -> list[str]:
    # Other programs make files there, too. The files of a killed program stay until its resource tracker removes them.
    deadline = time.monotonic() + grace_s
    earlier: set[str] = set()
    semaphores = _SEMAPHORES
    while suspects := {name for name in _files() - before if _is_mine(name, semaphores)}:
        if other_tests_run():
            semaphores = _SEMAPHORES[1:]
        suspects -= _held_by_others()
        if time.monotonic() >= deadline and suspects <= earlier:  # a program may start or end during one scan
            return [f"file {_SHM / name}" for name in sorted(suspects & _files())]
        earlier = suspects
        time.sleep(0.1)
    return []


def _is_mine(name: str, semaphores: tuple[str, ...]) -> bool:
    if name.startswith("sem.mp") and not name.startswith(semaphores):
        return False
    with contextlib.suppress(OSError):
        return (_SHM / name).stat().st_uid == os.getuid()
    return False


def other_tests_run() -> bool:
    """Whether another pytest runs on this machine, whose programs' semaphores look like those of ours."""
    family = {os.getpid(), *_children()}
    commands = {each.pid: each.info["cmdline"] or () for each in psutil.process_iter(["cmdline"])}
    return any("pytest" in command for pid, command in commands.items() if pid not in family)


def _held_by_others() -> set[str]:
    """Names in shared memory that some unrelated program of this machine has open."""
    held = set()
    for pid in {*psutil.pids()} - {os.getpid(), *_children()}:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            held |= {Path(name).name for name in re.findall(rf"{_SHM}/\S+", Path(f"/proc/{pid}/maps").read_text())}
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(file.readlink().name)
    return held
