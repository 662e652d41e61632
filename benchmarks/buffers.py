"""Programs with buffers of every kind, beside DDP: with 1, 2 and 4 workers, equal and slow ones, elastic, in an island.

    python -m benchmarks.buffers                          # about a quarter of an hour
    python -m benchmarks.buffers --only "batch norm" --systems "4 workers"
    python -m benchmarks.buffers --page                   # writes the table of docs/compatibility.md

Each program trains two epochs. It passes if the fit ends, if all workers hold the same persistent buffers then, and if
these are what the kind of buffer demands: variances are positive, singular vectors have length 1, and so on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.buffers_kinds import KINDS, WIDTH
from lightning_asgd.core.worker.module_state import digest_of, persistent_buffers
from tests.conformance.lab import Lab
from tests.conformance.pair import ASGD, DDP, ISLAND, Outcome, Pair
from tests.helpers.ports import free_port

PAGE = Path(__file__).parent / "libraries" / "buffers.md"
DEADLINE_S = 60.0
_RANK = "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK"


@dataclass(frozen=True)
class System:
    """How the programs are run: ``slow`` is the rank that sleeps in every step."""

    strategy: str = ASGD
    workers: int = 2
    slow: int | None = None
    package: str = "pytorch_lightning"
    options: dict[str, Any] = field(default_factory=dict)
    elastic: bool = False


SYSTEMS: dict[str, System] = {
    "DDP": System(DDP),
    "1 worker": System(workers=1),
    "2 workers": System(options={"nsync": 10}),
    "4 workers": System(workers=4, options={"nsync": 10}),
    "nsync=1": System(options={"nsync": 1}),
    "nsync=100": System(options={"nsync": 100}),
    "worker 1 is slow": System(slow=1, options={"nsync": 10}),
    "worker 0 is slow": System(slow=0, options={"nsync": 10}),
    "data='split'": System(options={"nsync": 10, "data": "split"}),
    "lightning": System(package="lightning.pytorch", options={"nsync": 10}),
    "elastic": System(elastic=True, options={"nsync": 10}),
    "an island": System(ISLAND),
}


class Ranks(Pair):
    """With other options than the conformance tests have."""

    def _make_strategy(self, **ddp_options: Any) -> Any:
        from lightning_asgd import ASGDStrategy

        options = {**self.options}
        if self.strategy == ASGD:
            return ASGDStrategy(**{"nsync": 4, **options})
        return super()._make_strategy(**ddp_options)


@dataclass(frozen=True)
class Program:
    """A fit of a small network with a layer of some kind. Runs on every rank, and returns what it finds."""

    kind: str
    slow: int | None = None
    elastic: bool = False

    def __call__(self, lab: Lab) -> dict[str, Any]:
        kind, slow = KINDS[self.kind], self.slow
        if self.elastic:
            for name in _RANK:
                os.environ.pop(name, None)

        class Overrides:
            def build(self: Any) -> None:
                self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), kind.make(), nn.ReLU(), nn.Linear(WIDTH, 1))

            def on_train_batch_start(self: Any, *_: Any) -> None:
                if lab.rank == slow:
                    time.sleep(0.02)

        module = lab.regression(Overrides, lr=0.01)
        torch.manual_seed(lab.rank)
        lab.fit(module, devices=1 if self.elastic else lab.workers)
        layer = module.net[2]
        return {"fault": kind.fault(layer), "digest": _digest(layer)}


def _digest(layer: nn.Module) -> str:
    digests = {name: digest_of({name: buffer.to_dense()}) for name, buffer in persistent_buffers(layer).items()}
    return hashlib.sha256(pickle.dumps(sorted(digests.items()))).hexdigest()


def verdict(outcomes: list[Outcome], kind: str, system: System) -> str:
    """What became of a program: empty if it passes."""
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        return errors[0].partition("\n")[0][:160]
    if faults := [outcome.facts["fault"] for outcome in outcomes if outcome.facts["fault"]]:
        return str(faults[0])
    same = KINDS[kind].same and not system.elastic and system.strategy != DDP
    if same and len({outcome.facts["digest"] for outcome in outcomes}) > 1:
        return "workers hold different buffers"
    return ""


def run(system: System, kinds: list[str], show: Callable[[str, str], None]) -> dict[str, str]:
    """The verdicts of all programs on one system."""
    found, options, pair = {}, dict(system.options), None
    folder = Path(tempfile.mkdtemp())  # not a TemporaryDirectory: a rank that ends would remove it
    for number, kind in enumerate(kinds):
        serve = None
        if system.elastic:
            options["run"] = f"127.0.0.1:{free_port()}/buffers-{number}"
            call = "from lightning_asgd.cli.command_line import main; main()"
            serve = subprocess.Popen([sys.executable, "-c", call, "serve", options["run"]], stdout=subprocess.DEVNULL)
        if pair is None:
            pair = Ranks(system.package, system.strategy, system.workers, **options)
        where = folder / str(number)
        where.mkdir()
        try:
            outcomes = pair.run(Program(kind, system.slow, system.elastic), where, DEADLINE_S)
            found[kind] = verdict(outcomes, kind, system)
        except TimeoutError as error:
            found[kind] = str(error).partition("\n")[0]
        show(kind, found[kind])
        if serve is not None or found[kind]:  # a rank may have ended with what failed
            pair.close()
            pair = None
        if serve is not None:
            serve.terminate()
            serve.wait(30)
    if pair is not None:
        pair.close()
    shutil.rmtree(folder)
    return found


def page(table: dict[str, dict[str, str]]) -> str:
    """The table for docs/compatibility.md."""
    ran = [kind for kind in KINDS if any(kind in each for each in table.values())]
    fails = {kind: [s for s in table if table[s].get(kind)] for kind in ran}
    passing = textwrap.wrap("; ".join(kind for kind in ran if not fails[kind]) + ".", 120, break_on_hyphens=False)
    rows = [f"| {kind} | {', '.join(where)} |" for kind, where in fails.items() if where]
    lines = [
        "## Buffers",
        "",
        "`make buffers` runs small programs, each with one kind of buffer, with each of:",
        *textwrap.wrap("; ".join(table) + ".", 120),
        "The fit ends with valid values in all, with the kinds below. In jobs of A-SGD all workers then hold the same",
        "buffers, except those that are not persistent or that only some workers make.",
        "",
        *passing,
    ]
    return "\n".join([*lines, "", *(["| buffer | fails with |", "|---|---|", *rows, ""] if rows else [])])


def main() -> None:
    """Run the programs and print what became of them. The exit code is 1 if any that passes with DDP fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds whose names contain this")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), help="names of systems")
    parser.add_argument("--page", action="store_true", help="write the table for docs/compatibility.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [kind for kind in KINDS if given.only in kind]
    table, begun = {}, time.monotonic()
    for name in given.systems:

        def show(kind: str, what: str, name: str = name) -> None:
            print(f"{time.monotonic() - begun:6.0f} s  {name:18} {kind:60} {what or 'passes'}", flush=True)

        table[name] = run(SYSTEMS[name], kinds, show)
    bad = [(name, kind, what) for name, found in table.items() for kind, what in found.items() if what]
    ours = [each for each in bad if each[0] != "DDP"]
    runs = sum(map(len, table.values()))
    print(f"{runs} runs, {len(bad)} do not pass: {len(ours)} of them under A-SGD")
    for name, kind, what in bad:
        print(f"  {name}: {kind}: {what}")
    if given.page:
        PAGE.write_text(page(table))
    raise SystemExit(bool(ours))


if __name__ == "__main__":
    main()
