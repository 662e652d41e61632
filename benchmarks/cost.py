"""CPU time by thread and process: what A-SGD takes beside two Trainers that never talk, which do the same steps.

    python benchmarks/cost.py
    python benchmarks/cost.py --after 30 --seconds 60 --repeats 1   # with the standby, which starts after 15 s

Runs are interleaved. Times are CPU time per step of one worker, so they count the same on a busy machine. It needs
Linux, whose kernel counts the CPU time of each thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from common import prepared, spread
from ranks import servers_of
from rich.table import Table
from throughput import CONSOLE, WARM_UP_S, Scenario, System, run, train

SYSTEMS = (System("unconnected"), System("A-SGD", 1000), System("A-SGD", 10))
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TRAINING = "training thread"


def threads(process: psutil.Process, names: Mapping[int, str] = {}) -> dict[str, float]:
    """Seconds of CPU time of a process by the names of its threads; threads of one name are added up."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text()
        except OSError:
            continue  # it has just ended
        name, _, rest = fields.partition("(")[2].rpartition(")")
        own = TRAINING if int(task.name) == process.pid else name
        user, system = rest.split()[11:13]
        seconds[names.get(int(task.name), own)] += (int(user) + int(system)) * TICK_S
    return dict(seconds)


def all_threads() -> dict[str, float]:
    """Those of this process, with the names that Python gave them, and of its servers."""
    me = psutil.Process()
    names = {t.native_id: t.name for t in threading.enumerate() if t is not threading.main_thread() and t.native_id}
    seconds = {f"worker: {name}": value for name, value in threads(me, names).items()}
    for number, server in enumerate(servers_of(me)):
        kind = ("server", "standby")[min(number, 1)]
        for name, value in threads(server).items():
            seconds[f"{kind}: {'main thread' if name == TRAINING else name}"] = value
    return seconds


def watched(
    folder: Path, after_s: float, scenario: Scenario, system: System, rank: int, last_step: Any
) -> dict[str, Any]:
    """As :func:`throughput.train`; the times of the threads in the window are written to a file."""
    import pytorch_lightning as pl

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.warm = time.monotonic() + max(WARM_UP_S, after_s)
            self.before: dict[str, float] = {}
            self.steps = 0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.steps += bool(self.before)
            if not self.before and time.monotonic() >= self.warm:
                self.before = all_threads()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            after = all_threads()
            seconds = {name: value - self.before.get(name, 0.0) for name, value in after.items()}
            (folder / f"{rank}.json").write_text(json.dumps({"steps": self.steps, "seconds": seconds}))

    return train(scenario, system, rank, last_step, callbacks=[Watch()])


def measure(scenario: Scenario, after_s: float) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of CPU time per step, by thread, of every run of every system; and the samples per second."""
    runs: dict[str, list[dict[str, float]]] = {str(system): [] for system in SYSTEMS}
    for repeat in range(scenario.repeats):
        for system in SYSTEMS:
            folder = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed by the first rank that exits
            try:
                result = run(scenario, system, None, partial(watched, folder, after_s))
                answers = [json.loads(file.read_text()) for file in folder.glob("*.json")]
            finally:
                shutil.rmtree(folder)
            steps = sum(answer["steps"] for answer in answers)
            times: defaultdict[str, float] = defaultdict(float)
            for answer in answers:
                for name, seconds in answer["seconds"].items():
                    times[name] += 1000 * seconds / steps
            runs[str(system)].append({**times, "samples/s": result["samples_per_s"]})
            speed = f"{result['samples_per_s']:7.0f} samples/s"
            CONSOLE.print(
                f"  {repeat + 1}/{scenario.repeats}  {system!s:<18} {speed}  {sum(times.values()):.3f} ms/step"
            )
    return runs


def show(scenario: Scenario, runs: dict[str, list[dict[str, float]]]) -> None:
    """Print a row per thread that takes a hundredth of a millisecond in some system, and the sums."""
    table = Table("ms of CPU time per step", *runs, title=f"medians; {scenario.describe()}", title_justify="left")
    medians = {
        system: {name: statistics.median(each.get(name, 0.0) for each in results) for name in set().union(*results)}
        for system, results in runs.items()
    }
    names = {n for of in medians.values() for n, value in of.items() if value >= 0.01 or n.startswith("standby")}
    names.discard("samples/s")
    for name in sorted(names, key=lambda name: -max(of.get(name, 0.0) for of in medians.values())):
        table.add_row(name, *(f"{of.get(name, 0.0):.3f}" for of in medians.values()))
    totals = [[sum(v for k, v in each.items() if k != "samples/s") for each in results] for results in runs.values()]
    table.add_row("all", *(f"{statistics.median(total):.2f}" for total in totals))
    table.add_row("samples/s", *(f"{of['samples/s']:.0f}" for of in medians.values()))
    base = [each["samples/s"] for each in runs[str(SYSTEMS[0])]]
    ratios = [[e["samples/s"] / b for e, b in zip(results, base, strict=True)] for results in runs.values()]
    text = [spread(r, 3) for r in ratios]
    table.add_row("/ unconnected", *text)
    CONSOLE.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring window of a run (default %(default)s)")
    parser.add_argument("--after", type=float, default=0.0, help="seconds of training before CPU time is counted")
    parser.add_argument("--params", type=float, default=0.6e6, help="parameters of the model (default %(default)g)")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread per worker
    import pytorch_lightning  # noqa: F401  # once, for all forked ranks

    scenario = Scenario("cost", params=int(args.params), seconds=args.after + args.seconds, repeats=args.repeats)
    CONSOLE.print(f"\n[bold]cost[/]: {scenario.describe()}  (load {os.getloadavg()[0]:.1f})")
    with prepared():
        show(scenario, measure(scenario, args.after))
    return 0


if __name__ == "__main__":
    sys.exit(main())
