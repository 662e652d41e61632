"""Disks that are full, read-only, slow or gone while a job trains, and files in which bits have flipped.

    python -m benchmarks.disks                 # all of it, as root: six minutes
    python -m benchmarks.disks --only full     # rows whose names contain this

Each disk is a file system of its own. It fails while a job trains on it, and works again later:

* a run: `lightning-asgd serve --snapshots` must name the failure within five seconds, and train on; stopped then, it
  must exit with 1 and say so; on the disk that works again it continues, and every sample counts once per epoch;
* a job that writes checkpoints must end with an error that names the file, as under DDP, within ten seconds; it
  continues from the latest whole checkpoint, and refuses a damaged one;
* a job with tables on the servers must refuse a disk that cannot hold them, and end with an error if they vanish.

A slow disk takes a tenth of a second for each write (FUSE: the system's libfuse, Debian's package libfuse2); training
must not wait for it. Flipped bits are in 200 places of each kind of file that is read back. Exits with 1 unless every
damage is named, or harmless.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks.disks_program import EPOCHS, SAMPLES
from benchmarks.libraries.overlay import overlay
from benchmarks.libraries.runner import RANKS
from tests.helpers.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
OVERLAY = ROOT / "results" / "disks"
PROGRAM = ROOT / "benchmarks" / "disks_program.py"
SECRET = "known to all of these processes"
NAMED_S, ENDED_S, TRAINED_S = 5.0, 10.0, 90.0
ERROR = re.compile(r"\b\w*Error: .*")
NAMED = "No snapshot was written to "
FLIPPED = (
    "tests/component/test_snapshots.py::test_a_flipped_bit_is_never_read_as_another_weight",
    "tests/component/test_served_tables.py::test_a_flipped_bit_is_never_read_as_another_row",
    "tests/lightning/test_checkpoint.py::test_a_flipped_bit_in_a_checkpoint_is_refused_or_changes_nothing",
)
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(RANKS)}
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def call(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    call("mount", "-t", "tmpfs", *options, "tmpfs", folder)
    try:
        yield
    finally:
        call("umount", "--lazy", folder)


# ---------------------------------------------------------------------- how a disk fails: each ends with its repair


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    with mounted(disk, "-o", "ro"):  # over what is there
        yield


@contextlib.contextmanager
def gone(disk: Path) -> Iterator[None]:
    """The folder within the disk is gone, and later it is there again, with what it held."""
    with mounted(disk):
        yield


FAULTS: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "full": full,
    "read-only": read_only,
    "gone": gone,
}


# ---------------------------------------------------------------------- what trains there


class Program:
    """A process with its output."""

    def __init__(self, folder: Path, name: str, *command: str | Path) -> None:
        self.name, self.file = name, folder / f"{name}.log"
        with self.file.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**CLEAN, "PYTHONPATH": str(ROOT), "LIGHTNING_ASGD_SECRET": SECRET, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.file.read_text()

    def code(self, seconds: float) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} had not ended after {seconds:g} s:\n{self.said[-2500:]}") from None

    def error(self, seconds: float) -> str:
        """The last error that it has named, with which it must end."""
        assert self.code(seconds) != 0, "it trains on"
        named = ERROR.findall(self.said)
        assert named, self.said[-2500:]
        return str(named[-1])

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def wait(condition: Callable[[], bool], seconds: float, what: str, program: Program) -> float:
    begun = time.monotonic()
    while not condition():
        took = time.monotonic() - begun
        assert took < seconds, f"{what} did not happen within {seconds:g} s:\n{program.said[-2500:]}"
        time.sleep(0.02)
    return time.monotonic() - begun


def once_per_epoch(out: Path) -> None:
    seen = json.loads(out.read_text())
    wrong = sum(count != EPOCHS for count in seen)
    assert not wrong, f"{wrong} of {SAMPLES} samples were not trained exactly once per epoch: {min(seen)}, {max(seen)}"


def serve(folder: Path, disk: Path, port: int) -> Program:
    about = f"127.0.0.1:{port}/disks", f"--snapshots={disk / 'snapshots'}", "--snapshot-every-s=0.2"
    command = "from lightning_asgd.cli.command_line import main; raise SystemExit(main())"
    return Program(folder, "serve", "-c", command, "serve", *about)


def run_on(folder: Path, disk: Path, fault: str) -> str:
    """A run whose disk fails, and works again."""
    port, snapshot = free_port(), disk / "snapshots" / "server0.pt"
    (disk / "snapshots").mkdir()
    programs = [serve(folder, disk, port)]
    try:
        worker = Program(folder, "worker", PROGRAM, "run", f"127.0.0.1:{port}/disks", folder / "seen.json")
        programs.append(worker)
        wait(snapshot.exists, 60, "a first snapshot", programs[0])
        with FAULTS[fault](disk):
            if fault == "gone":  # the servers create the folder again
                wait(snapshot.exists, NAMED_S, "a snapshot in a new folder", programs[0])
                about = "snapshots go into a new folder; an older one is back when the run continues"
            else:
                named_s = wait(lambda: NAMED in programs[0].said, NAMED_S, "a warning", programs[0])
                line = next(line for line in programs[0].said.splitlines() if NAMED in line)
                about = f"named after {named_s:.1f} s: {line[-140:]}"
            os.kill(programs[0].process.pid, signal.SIGTERM)
            code = programs[0].code(60)
            assert code == (0 if fault == "gone" else 1), f"serve ended with {code}:\n{programs[0].said[-2500:]}"
            if code:
                assert "could not write its last snapshot" in programs[0].said, programs[0].said[-2500:]
        programs.append(serve(folder, disk, port))
        code = worker.code(TRAINED_S)
        assert code == 0, f"the worker ended with exit code {code}:\n{worker.said[-2500:]}"
        once_per_epoch(folder / "seen.json")
        os.kill(programs[-1].process.pid, signal.SIGTERM)
        code = programs[-1].code(60)
        assert code == 0, f"serve ended with exit code {code}:\n{programs[-1].said[-2500:]}"
        left = sorted(each.name for each in (disk / "snapshots").iterdir())
        assert left == ["serve.lock", "server0.pt"], left
    finally:
        for program in programs:
            program.end()
    return about


def checkpoints_on(folder: Path, disk: Path, fault: str) -> str:
    """A job whose checkpoints cannot be written any more, and that is resumed."""
    place, out = disk / "checkpoints", folder / "seen.json"
    job = Program(folder, "job", PROGRAM, "job", place, out)
    try:
        wait(lambda: any(place.glob("*.ckpt")), 60, "a first checkpoint", job)
        with FAULTS[fault](disk):
            begun = time.monotonic()
            code = job.code(TRAINED_S)
            took = time.monotonic() - begun
            assert code != 0 or fault == "gone", "the job ended with exit code 0"
            named = ERROR.findall(job.said)
            assert named or fault == "gone", job.said[-2500:]
    finally:
        job.end()
    whole, refused = 0, 0
    for path in sorted(place.glob("*.ckpt"), key=lambda each: -each.stat().st_mtime):
        again = Program(folder, "again", PROGRAM, "job", folder / "elsewhere", out, path)
        try:
            if again.code(TRAINED_S) == 0:
                once_per_epoch(out)
                whole += 1
                break
            refused += 1
            assert re.search("damaged|Error", again.said), again.said[-2500:]
        finally:
            again.end()
    assert whole, f"no checkpoint can be resumed from; {refused} were refused"
    about = f"ended after {took:.1f} s: {named[-1][:110]}" if code else "the job created the folder again"
    return f"{about}; {refused} damaged ones refused, resumed from the next"


def tables_on(folder: Path, disk: Path, fault: str) -> str:
    """A job with a table: refused where the disk fails from the beginning."""
    with FAULTS[fault](disk):
        job = Program(folder, "job", PROGRAM, "tables", disk / "tables", folder / "seen.json")
        try:
            wait(lambda: "BEGUN" in job.said, 60, "its beginning", job)
            if fault == "gone":
                assert job.code(ENDED_S + 20) == 0, job.said[-2500:]
                return "the folder is empty: the table begins there"
            return f"refused: {job.error(ENDED_S + 20)[:150]}"
        finally:
            job.end()


def tables_vanish(folder: Path, disk: Path) -> str:
    """The files of a table are removed while a job trains."""
    job = Program(folder, "job", PROGRAM, "tables", disk / "tables", folder / "seen.json")
    try:
        wait(lambda: any((disk / "tables").glob("*.journal")), 60, "the table", job)
        time.sleep(2.0)
        shutil.rmtree(disk / "tables")
        begun = time.monotonic()
        error = job.error(TRAINED_S)
        return f"ended after {time.monotonic() - begun:.1f} s: {error[:120]}"
    finally:
        job.end()


def slow(folder: Path, disk: Path) -> str:
    """A run whose disk takes a tenth of a second for every write."""
    behind = folder / "behind"
    (behind / "snapshots").mkdir(parents=True)
    python = overlay(OVERLAY, ("mfusepy>=3",))
    about = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    file_system = subprocess.Popen([python, ROOT / "benchmarks" / "disks_slow.py", behind, disk], **about)  # type: ignore[call-overload]
    port, programs = free_port(), list[Program]()
    try:
        until = time.monotonic() + 20
        while not os.path.ismount(disk):
            assert time.monotonic() < until, "the slow file system did not start"
            assert file_system.poll() is None, "the slow file system has ended"
            time.sleep(0.05)
        programs.append(serve(folder, disk, port))
        worker = Program(folder, "worker", PROGRAM, "run", f"127.0.0.1:{port}/disks", folder / "seen.json")
        programs.append(worker)
        wait(lambda: "BEGUN" in worker.said, 60, "the worker's beginning", worker)
        begun = time.monotonic()
        code = worker.code(TRAINED_S)
        took = time.monotonic() - begun
        assert code == 0, f"the worker ended with exit code {code}:\n{worker.said[-2500:]}"
        once_per_epoch(folder / "seen.json")
        os.kill(programs[0].process.pid, signal.SIGTERM)
        code = programs[0].code(60)
        assert code == 0, f"serve ended with exit code {code}:\n{programs[0].said[-2500:]}"
        return f"trained in {took:.1f} s"
    finally:
        for program in programs:
            program.end()
        subprocess.run(["umount", "--lazy", disk], check=False, capture_output=True)
        file_system.kill()
        file_system.wait()


def flipped(folder: Path) -> str:
    """200 places in each kind of file, a bit each."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FLIPPED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:]
    return found.stdout.strip().splitlines()[-1]


def rows() -> Iterator[tuple[str, Callable[[Path, Path], str]]]:
    """Names, and what is tried in a folder with a disk."""
    for fault in FAULTS:
        for what, trial in (("a run", run_on), ("checkpoints", checkpoints_on), ("tables", tables_on)):
            yield f"{fault}, {what}", lambda folder, disk, trial=trial, fault=fault: trial(folder, disk, fault)  # type: ignore[misc]
    yield "removed files of a table", tables_vanish
    yield "slow, a run", slow
    yield "flipped bits", lambda folder, disk: flipped(folder)


def main() -> int:
    """Try everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    args = parser.parse_args()
    if os.geteuid() != 0:
        CONSOLE.print("Not root, so no file system can be mounted: only flipped bits are tried.")
    good = True
    for name, trial in rows():
        if args.only not in name or (os.geteuid() != 0 and name != "flipped bits"):
            continue
        if name.startswith("slow") and not (Path("/dev/fuse").exists() and ctypes.util.find_library("fuse")):
            CONSOLE.print(f"[yellow]SKIP[/]  {name}: no /dev/fuse, or no libfuse (Debian: libfuse2)")
            continue
        with tempfile.TemporaryDirectory(prefix="disks-") as home:
            folder = Path(home)
            disk = folder / "disk"
            disk.mkdir()
            try:
                with mounted(disk, "-o", "size=8m"):
                    text, fine = trial(folder, disk), True
            except AssertionError as error:
                text, fine = str(error), False
        good &= fine
        CONSOLE.print(f"{'[green]PASS[/]' if fine else '[red]FAIL[/]'}  {name}: {escape(text)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
