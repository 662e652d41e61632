"""Writes docs/compatibility.md from the cases: ``python -m tests.conformance.page``. The battery shows it is true."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from tests.conformance.case import Case
from tests.conformance.cases import CASES

__all__ = ["PAGE", "page"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
# Written by tests.conformance.island_column.
ISLANDS: dict[str, str] = json.loads(Path(__file__).with_name("islands.json").read_text())
# Written with --page by benchmarks/several_trainers.py, buffers.py, programs.py and streams.py.
PROGRAMS = [ROOT / "benchmarks" / "libraries" / name for name in ("several.md", "buffers.md", "page.md", "streams.md")]
ORDER = (
    "Optimization",
    "Modules",
    "Checkpoints",
    "Callbacks",
    "Trainer options",
    "Calls",
    "Libraries that ask torch.distributed",
    "Metrics",
    "Loggers",
)
HEAD = """# What works

This page says which features of Lightning work with `ASGDStrategy`, and what differs from DDP. Up to
[Launchers](#launchers) each is a test in `tests/conformance`: two workers train under DDP and under A-SGD, with
`pytorch_lightning` and with `lightning.pytorch`. Both must pass the same sync points after the same number of steps,
log the same metrics, write the same files and reach as low a loss. All workers must hold the same bits at every sync
point. The other sections name their own programs. `make compatibility` writes this page; do not edit it.

- **A-SGD**: *works*, *differs*, or *refused* with an error that says why.
- **DDP**: *works*, or *fails* with an error; *-* if it hangs or has nothing to compare with.
- **island**: two processes that are one [island (worker group)](howto/islands.md) with DDP inside. *equal* means DDP's
  loss to the bit, and the same sync points, metrics and files; *-* means not run.

Features that are listed above a table work with A-SGD and with DDP, and are equal in an island.
"""
MORE = {  # what has a test of its own
    "Checkpoints": ["| resume what DDP wrote, and under DDP what A-SGD wrote | works | works | - | |"],
    "Optimization": [
        '| `precision="16-mixed"` | works | - | - | GPUs only; on CPUs Lightning takes `"bf16-mixed"`. Steps that '
        "`GradScaler` skips push no gradient. |"
    ],
}
LAUNCHERS = """## Launchers

Tested in `tests/lightning/`, each with real processes.

| launcher | | note |
|---|---|---|
| `strategy="asgd"`, `"asgd_fork"`, `"asgd_spawn"` | works | a worker that dies does not stop the others |
| notebooks (Jupyter), `strategy="asgd_notebook"` | works | by `fork`: do not train in the notebook's process first |
| `torchrun`, one node and two | works | |
| several nodes, `MASTER_ADDR`, `MASTER_PORT`, `NODE_RANK` | works | |
| torchrun groups, Kubernetes, Kubeflow, SLURM arrays that join an elastic run | works | |
| SLURM (`srun`) | works | tested with SLURM's own daemons on one machine |
| `LightningCLI` | works | |
| CUDA devices | works | on one H100 with torch 2.11; several GPUs in one job have not been run |
| Apple's MPS | not run yet | in elastic runs (`run=...`) only; tested with a CPU in its place |
| others (XPU, HPU, NPU) | not run yet | as an object of an `Accelerator` class; tested with a CPU in its place |
"""


def page() -> str:
    """The page's text."""
    groups: dict[str, list[Case]] = {group: [] for group in ORDER}
    for case in CASES.values():
        groups[case.group].append(case)
    parts = [HEAD]
    for group, cases in groups.items():
        parts += [f"## {group}", ""]
        if plain := [case.title for case in cases if _cells(case) == PLAIN]:
            parts += textwrap.wrap("; ".join(plain) + ".", 120, break_long_words=False, break_on_hyphens=False)
            parts.append("")
        rows: dict[tuple[str, ...], list[str]] = {}
        for case in cases:
            if _cells(case) != PLAIN:
                rows.setdefault(_cells(case), []).append(case.title)
        lines = [f"| {'; '.join(titles)} | {' | '.join(cells)} |" for cells, titles in rows.items()]
        if lines := [line.replace("|  |", "| |") for line in lines] + MORE.get(group, []):
            parts += ["| feature | A-SGD | DDP | island | note |", "|---|---|---|---|---|", *lines, ""]
    return "\n".join([*parts, LAUNCHERS, *(file.read_text() for file in PROGRAMS)])


PLAIN = "works", "works", "equal", ""


def _cells(case: Case) -> tuple[str, ...]:
    """A row without the feature's name; features with the same cells share a row."""
    ddp = "-" if not case.ddp else "fails" if case.ddp_fails else "works"
    island = ISLANDS.get(case.name, "-").partition(":")[0].replace("DDP fails", "fails")
    return case.status, ddp, island, case.note


if __name__ == "__main__":
    PAGE.write_text(page())
