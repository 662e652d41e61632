"""Layer-wise asynchronous descent beside DDP: two and four workers, on one machine and on slow networks.

    python benchmarks/layerwise.py                       # all scenarios: about 40 minutes; as root
    python benchmarks/layerwise.py --only "100 Mbit/s"   # those whose names contain this
    python benchmarks/layerwise.py --timeline            # the picture only

Systems: DDP, whose buckets leave during backward; the same with one bucket, which leaves after backward, as in the
paper's comparison; LayerWise() and LayerWise(delay=1). All are interleaved, and ratios are those of one turn. The
networks are a CNN of 4 layers and GoogLeNet of torchvision, with 115 layers that have weights.

The picture shows two steps of worker 1, GoogLeNet at 400 Mbit/s: when it computes, and when which gradients are sent.
Writes results/layerwise.json and results/layerwise-timeline.png.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import prepared, spread, verdict
from network import two_machines
from rich.table import Table
from throughput import CONSOLE, Patience, Scenario, System, measure, ratios, run, save, show, train

from lightning_asgd.report.picture_style import PAPER, pyplot

# Mbit/s of the network. At 400 GoogLeNet's gradients take about as long as its step.
SPEEDS: dict[str, tuple[float | None, ...]] = {"cnn": (None, 100.0), "googlenet": (None, 400.0, 100.0)}
CLAIM = 1.7  # of Daily, Vishnu and Siegel, for the paper's kind of scenario
PICTURE = Path(__file__).resolve().parent.parent / "results" / "layerwise-timeline.png"
SHOWN = 2  # steps in the picture
SHOWN_MBIT = 400.0
SYSTEMS = ("DDP, all gradients after backward", "DDP", "layer-wise")
Results = list[tuple[Scenario, dict[str, list[dict[str, Any]]]]]


def scenarios(base: Scenario) -> list[Scenario]:
    """Each network on equal workers and on a slow network, with two and four workers."""
    found = []
    for workers in (2, 4):
        for network in ("cnn", "googlenet"):
            for mbit in SPEEDS[network]:
                name = f"{'GoogLeNet' if network == 'googlenet' else 'CNN'}, {workers} workers"
                name += f", {mbit:g} Mbit/s" if mbit else ""
                found.append(replace(base, name=name, network=network, workers=workers, bandwidth=mbit))
    return found


# ---------------------------------------------------------------------- the time line


class Timeline:
    """Notes what a worker does in some steps: when it computes, and when which message of gradients is under way."""

    def __init__(self, at: int) -> None:
        self._steps = range(at, at + SHOWN)
        self._on = False
        self._since = 0.0
        self.computing: list[tuple[str, float, float]] = []
        self.sending: list[tuple[float, float]] = []

    def callback(self) -> Any:
        """What a Trainer is given. It has none of the hooks that may look at gradients."""
        import pytorch_lightning as pl

        line = self

        class Noter(pl.Callback):
            def on_train_start(self, trainer: Any, module: Any) -> None:
                line.watch(trainer.strategy)

            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                line._on, line._since = batch_idx in line._steps, time.monotonic()

            def on_train_batch_end(self, *_: Any) -> None:
                line.note("optimizer")

        return Noter()

    def note(self, what: str) -> None:
        """What has taken the time since the last note."""
        now = time.monotonic()
        if self._on:
            self.computing.append((what, self._since, now))
        self._since = now

    def watch(self, strategy: Any) -> None:
        """Have backward noted, and each message of gradients from its start until its mean is there."""
        backward = strategy.backward

        def noted(*args: Any, **more: Any) -> Any:
            self.note("forward")
            result = backward(*args, **more)
            self.note("backward")
            return result

        strategy.backward = noted
        if not hasattr(strategy, "fit_session"):
            strategy.model.register_comm_hook(None, lambda state, bucket: self._bucket(state, bucket))
            return
        connection = strategy.fit_session.synchronizer._connection
        post = connection.post

        def posted(server: int, message: Any, *more: Any) -> Any:
            future = post(server, message, *more)
            return future if getattr(message, "gradient", None) is None else self._follow(future)

        connection.post = posted

    def _bucket(self, state: Any, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        return self._follow(allreduce_hook(state, bucket))

    def _follow(self, future: Any) -> Any:
        if self._on:
            begun = time.monotonic()
            future.add_done_callback(lambda _: self.sending.append((begun, time.monotonic())))
        return future


def noted(file: Path, at: int, scenario: Scenario, system: System, rank: int, last_step: Any) -> dict[str, Any]:
    """As :func:`throughput.train`. The last worker, which is on the other machine, writes its time line into a file."""
    line = Timeline(at)
    last = rank == scenario.workers - 1
    result = train(scenario, system, rank, last_step, callbacks=[line.callback()] if last else [])
    if last:
        begun = line.computing[0][1]
        computing = [(what, start - begun, end - begun) for what, start, end in line.computing]
        file.write_text(json.dumps([computing, sorted((start - begun, end - begun) for start, end in line.sending)]))
    return result


def timeline(scenario: Scenario) -> None:
    """Draw what each system does in two steps of a scenario."""
    plt = pyplot()
    systems = [s for s in scenario.systems if s.kind in SYSTEMS]
    figure, axes = plt.subplots(len(systems), 1, figsize=(10, 1.9 * len(systems)), sharex=True, layout="constrained")
    colours = {"forward": PAPER["blue"], "backward": PAPER["orange"], "optimizer": PAPER["green"]}
    with two_machines(scenario.bandwidth) as network:
        for axis, system in zip(axes, systems, strict=True):
            file = Path(tempfile.mkdtemp()) / "line.json"  # a TemporaryDirectory is removed by the first rank that ends
            run(scenario, system, network, partial(noted, file, 4))
            computing, sending = json.loads(file.read_text())
            shutil.rmtree(file.parent)
            for what, start, end in computing:
                axis.barh(1, end - start, left=start, height=0.7, color=colours[what])
            for row, (start, end) in enumerate(sending):
                axis.barh(
                    -0.9 * row / max(1, len(sending) - 1), end - start, left=start, height=0.04, color=PAPER["ink"]
                )
            axis.set_yticks([1, -0.45], ["computing", "gradients\nin flight"])
            axis.set_title(f"{system}: {computing[-1][2] / SHOWN:.2f} s per step", loc="left")
            CONSOLE.print(f"  {system!s:<20} {computing[-1][2] / SHOWN:.2f} s per step")
    axes[-1].set_xlabel("seconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside upper right", ncols=3)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)
    plt.close(figure)
    CONSOLE.print(f"picture: {PICTURE}")


# ---------------------------------------------------------------------- the table


def summarise(results: Results) -> None:
    """Print how layer-wise descent compares in each scenario, and whether the claim holds in any."""
    table = Table(title="Speed of layer-wise descent, medians (min-max)", title_justify="left")
    for heading in ("", "delay", "/ DDP", "/ DDP that sends after backward"):
        table.add_column(heading, justify="left" if not heading else "right")
    best = 0.0
    for scenario, runs in results:
        for delay in scenario.delays:
            system = str(System("layer-wise", delay))
            beside = [ratios(scenario, runs, system, base) for base in ("DDP", "DDP, all gradients after backward")]
            best = max(best, *map(statistics.median, beside))
            table.add_row(scenario.name, str(delay), *(spread(r) for r in beside))
    CONSOLE.print(table)
    verdict(best >= CLAIM, f"the largest ratio is {best:.2f}, the paper's claim {CLAIM}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="measuring window of a run (default %(default)s)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose names contain it")
    parser.add_argument("--timeline", action="store_true", help="the picture only")
    args = parser.parse_args()
    if not any(args.only in scenario.name for scenario in scenarios(Scenario(""))):
        parser.error(f"--only {args.only!r} is in no scenario's name")
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread per worker
    import pytorch_lightning  # noqa: F401  # once, for all forked ranks

    base = Scenario("", batch=args.batch, seconds=args.seconds, repeats=args.repeats, nsync=(), delays=(0, 1))
    base = replace(base, kinds=SYSTEMS)
    with prepared(machines=True):
        if not args.timeline:
            results = []
            for scenario in scenarios(base):
                if args.only in scenario.name:
                    runs = measure(scenario, Patience(0.0))
                    results.append((scenario, runs))
                    show(scenario, runs)
                    save(results, "results/layerwise.json")
            summarise(results)
        timeline(next(s for s in scenarios(base) if s.network == "googlenet" and s.bandwidth == SHOWN_MBIT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
