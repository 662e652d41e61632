"""Has A-SGD become slower, or larger, since another commit?

    make regress BASE=<commit>
    python benchmarks/regress.py <commit> --repeats 1 --seconds 2 --scenario equal      # a quick look

The other commit is checked out next to this tree. This tree's benchmarks measure both libraries, interleaved: base and
new, new and base, ... so that a machine that gets slower or busier affects both. Every run is a separate process, and
reports which library it has imported.

Each ratio is taken between neighbouring runs, and more is better: samples per second of new / base, memory of
base / new. The interval holds the true ratio with a probability of 95 %: Student's t over the logarithms of the ratios.
The exit code is 1 if an interval is entirely below 0.97. It takes half an hour at most on two cores. Without root the
slow network is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import CONSOLE, prepared
from network import available
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 0.97
CONFIDENCE = 0.95
RUN_S = 300.0


@dataclass(frozen=True)
class Scenario:
    """What is measured.

    Attributes:
        program: of this folder.
        options: for it.
    """

    name: str
    program: str
    options: tuple[str, ...] = ()

    @property
    def needs_root(self) -> bool:
        return "--bandwidth" in self.options


SCENARIOS = (
    Scenario("equal", "throughput.py"),
    Scenario("straggler", "throughput.py", ("--straggler", "0.1")),
    Scenario("100 Mbit/s", "throughput.py", ("--bandwidth", "100")),
    Scenario("17 M", "throughput.py", ("--params", "17e6")),
    Scenario("memory", "memory.py"),
)


@dataclass(frozen=True)
class Comparison:
    """Ratios of one figure, and what they say together."""

    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true ratio lies; from one repeat nothing is known."""
        if len(self.ratios) < 2:
            return 0.0, math.inf
        from scipy.stats import t

        logs = [math.log(ratio) for ratio in self.ratios]
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        reach = float(t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * error
        middle = statistics.fmean(logs)
        return math.exp(middle - reach), math.exp(middle + reach)

    @property
    def worse(self) -> bool:
        return self.interval[1] < LIMIT


def compare(base: Sequence[float], new: Sequence[float], *, more_is_better: bool = True) -> Comparison:
    """Compare figures that were measured in turns.

    Args:
        base: of the other commit, by repeat.
        new: of this tree.
        more_is_better: whether a larger figure is the better one.
    """
    pairs = zip(base, new, strict=True)
    return Comparison(tuple(n / b if more_is_better else b / n for b, n in pairs))


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Another commit's files, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="regress-") as name:
        tree = Path(name) / "base"
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`git {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()


def measure(scenario: Scenario, tree: Path, seconds: float) -> dict[str, float]:
    """Run a benchmark once with a tree's library.

    Args:
        scenario: what to measure.
        tree: whose library.
        seconds: that a window of samples lasts.

    Returns:
        its figures by name.

    Raises:
        RuntimeError: it failed, or measured another library.
    """
    speed = scenario.program == "throughput.py"
    with tempfile.TemporaryDirectory() as name:
        found = Path(name) / "found.json"
        more = ("--systems", "A-SGD", "--repeats", "1", "--seconds", f"{seconds:g}") if speed else ("--brief",)
        command = [sys.executable, ROOT / "benchmarks" / scenario.program, *scenario.options, *more, "--json", found]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        # a session of its own, so that Ctrl-C reaches this program alone, which then ends that one
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=RUN_S)
        except BaseException as error:
            for number in (signal.SIGTERM, signal.SIGKILL):  # its workers, too
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=10)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{scenario.name} was not done within {RUN_S:g} s.") from error
            raise
        if process.returncode != 0:
            raise RuntimeError(f"{scenario.name} ended with exit code {process.returncode}:\n{output[-4000:]}")
        content = json.loads(found.read_text())
    if not Path(content["machine"]["library"]).is_relative_to(tree):
        raise RuntimeError(f"{scenario.name} measured {content['machine']['library']}, expected the library of {tree}.")
    if speed:
        (runs,) = content["scenarios"][0]["runs"].values()
        return {"samples/s": runs[0]["samples_per_s"], "others' CPU": runs[0]["other_cpu_share"]}
    return {f"{process} MB": peak / 1e6 for process, peak in content["rss"].items()}


def show(found: dict[tuple[str, str], tuple[list[float], list[float]]]) -> bool:
    """Print all ratios.

    Returns:
        whether nothing has become worse.
    """
    table = Table(title="new / base, more is better (memory: base / new)", title_justify="left")
    for heading in ("", "", "base", "new", "ratio", "min", "max", f"{CONFIDENCE:.0%} interval", ""):
        table.add_column(heading, justify="right" if heading else "left")
    good = True
    for (name, figure), (base, new) in found.items():
        compared = compare(base, new, more_is_better=figure == "samples/s")
        good &= not compared.worse
        low, high = compared.interval
        medians = [f"{statistics.median(values):.0f}" for values in (base, new)]
        ratios = [f"{value:.3f}" for value in (compared.median, min(compared.ratios), max(compared.ratios))]
        interval = f"{low:.3f} - {high:.3f}" if high < math.inf else "unknown"
        table.add_row(name, figure, *medians, *ratios, interval, "[red]WORSE" if compared.worse else "")
    CONSOLE.print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="commit to compare this tree with")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring window of a run (default %(default)s)")
    parser.add_argument("--scenario", choices=[s.name for s in SCENARIOS], action="append")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: expected at least 1")
    scenarios = [s for s in SCENARIOS if not args.scenario or s.name in args.scenario]
    if any(s.needs_root for s in scenarios) and (reason := available()) is not None:
        CONSOLE.print(f"left out: {', '.join(s.name for s in scenarios if s.needs_root)}. {reason}")
        scenarios = [s for s in scenarios if not s.needs_root]
    found: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    busy: list[float] = []
    began = time.monotonic()
    with prepared(), checked_out(args.base) as base:
        trees = (base, ROOT)
        for number, tree in enumerate(trees):
            CONSOLE.print(
                f"{('base', 'new')[number]}: {_git('-C', str(tree), 'describe', '--always', '--dirty')}, {tree}"
            )
        for repeat in range(args.repeats):
            for scenario in scenarios:
                for number in (0, 1) if repeat % 2 == 0 else (1, 0):
                    figures = measure(scenario, trees[number], args.seconds)
                    busy.append(figures.pop("others' CPU", 0.0))
                    for figure, value in figures.items():
                        found.setdefault((scenario.name, figure), ([], []))[number].append(value)
                    text = ", ".join(f"{figure} {value:.0f}" for figure, value in figures.items())
                    turn = f"{repeat + 1}/{args.repeats}"
                    CONSOLE.print(f"  {turn}  {scenario.name:<11} {('base', 'new')[number]:<5} {text}")
    good = show(found)
    CONSOLE.print(
        f"{(time.monotonic() - began) / 60:.0f} minutes; other programs took up to {max(busy):.0%} of a core: "
        "above a few per cent the figures are worth little."
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
