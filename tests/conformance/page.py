"""Writes docs/compatibility.md from the cases: ``python -m tests.conformance.page``. The battery shows it is true."""

from __future__ import annotations

import json
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

Every line is a test that trains with two workers under `strategy="ddp"` and under `ASGDStrategy`, with Trainers of
`pytorch_lightning` and of `lightning.pytorch`, and compares: the same sync points after the same number of steps, the
same names of metrics, the same files, a loss as low as DDP's; and the same bits on all workers at every sync point
(`pytest tests/conformance`). This page is made from these tests by `make compatibility`; do not edit it.
The tables at its end show third-party libraries.

**refused**: with an error that says why. **compared with DDP**: *yes*; *DDP fails* if DDP raises an error; *no* if DDP
hangs or has no such feature. **in an island**: *equal* if two processes that are one [island](howto/islands.md)
with DDP inside end with the loss of DDP to the bit, and with the same sync points, metrics and files
(`python -m tests.conformance.island_column`).
"""
MORE = {  # what has a test of its own
    "Checkpoints": ["| resume what DDP wrote, and under DDP what A-SGD wrote | works | yes | | |"],
    "Optimization": [
        '| `precision="16-mixed"` | works | | | GPUs only; on CPUs Lightning takes `"bf16-mixed"`. A worker trains as '
        "Lightning alone, also where its `GradScaler` skips steps. Skipped steps push no gradient. |"
    ],
}
LAUNCHERS = """## Launchers

Tested in `tests/lightning/`, each with real processes.

| launcher | | note |
|---|---|---|
| `start_method="popen"`, `strategy="asgd"` | works | a worker that dies does not stop the others |
| `start_method="fork"`, `strategy="asgd_fork"` | works | a worker that dies does not stop the others |
| `start_method="spawn"`, `strategy="asgd_spawn"` | works | a worker that dies does not stop the others |
| notebooks (Jupyter), `strategy="asgd_notebook"` | works | by `fork`: do not train in the notebook's process first |
| `torchrun`, one node and two | works | |
| torchrun groups, Kubernetes, Kubeflow, SLURM arrays that join an elastic run | works | `make engines` |
| several nodes, `MASTER_ADDR`, `MASTER_PORT`, `NODE_RANK` | works | |
| SLURM (`srun`) | works | tested with the variables that SLURM sets |
| `LightningCLI` | works | `strategy: {class_path: lightning_asgd.ASGDStrategy, init_args: {nsync: 5}}` |
| CUDA devices | works | `make gpu`, on one H100 with torch 2.11; several GPUs in one job have not been run |
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
        heading = "| feature | A-SGD | compared with DDP | in an island | note |"
        parts += [f"## {group}", "", heading, "|---|---|---|---|---|"]
        parts += [*(_row(case) for case in cases), *MORE.get(group, [])]
        parts.append("")
    return "\n".join([*parts, LAUNCHERS, *(file.read_text() for file in PROGRAMS)])


def _row(case: Case) -> str:
    compared = "no" if not case.ddp else "DDP fails" if case.ddp_fails else "yes"
    note = case.note
    if case.refused:
        note = f"{note} Error: *{case.refused.replace(chr(92), '')}*"
    island = ISLANDS.get(case.name, "")
    return f"| {case.title} | {case.status} | {compared} | {island} | {note} |".replace("  |", " |")


if __name__ == "__main__":
    PAGE.write_text(page())
