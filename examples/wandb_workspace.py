"""Put a workspace with charts of all metrics (docs/monitoring.md) into a project on Weights & Biases.

    pip install wandb-workspaces
    python examples/wandb_workspace.py my-team digits           # needs an account: wandb login
    python examples/wandb_workspace.py my-team digits --print   # sends nothing, and needs neither account nor network

Each chart has one line for all workers together, and one for each worker: with ASGDMonitor(detail="all") in all charts,
else in those of samples per second and of waiting.
"""

from __future__ import annotations

import argparse
import inspect
import json

import pytorch_lightning.loggers.wandb
import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as workspaces

SECTIONS = {
    "Learning": {"Training loss": "train_loss", "Epochs trained": "epoch"},
    "Speed": {
        "Samples per second": "samples_per_s",
        "Tokens per second": "tokens_per_s",
        "Updates per second": "updates_per_s",
        "Workers alive": "workers/alive",
    },
    "Waiting": {
        "Share of the time waited": "wait/share",
        "for the servers' replies": "wait/exchange",
        "at sync points": "wait/sync",
        "for data": "wait/data",
    },
    "Staleness": {
        "Mean staleness": "staleness/mean",
        "Largest staleness": "staleness/max",
        "Distance from the servers' weights": "distance",
        "Gain of outer momentum": "outer_gain",
        "Gain of the workers' steps": "gain",
        "Updates refused": "updates/refused",
        "Updates repeated": "updates/repeated",
    },
    "Exchanges": {
        "Round trip, s": "exchange/round_trip_s",
        "Wait per exchange, s": "exchange/wait_s",
        "Bytes per exchange": "exchange/bytes",
        "Bytes per second": "traffic/bytes_per_s",
        "Steps between two": "nsync",
    },
    "Served tables": {
        "Rows that were not fetched": "tables/hits",
        "Age of rows, steps": "tables/age",
    },
}
OF_ALL_ONLY = {"workers/alive"}
# Lightning's name of the Trainer's step, which a later release shortens.
NAMES_OF_STEP = ("trainer/global_step", "global_step")
STEP = next(n for n in NAMES_OF_STEP if f'"{n}"' in inspect.getsource(pytorch_lightning.loggers.wandb.WandbLogger))


def expression(name: str) -> str:
    """What finds a metric of all workers together and of each."""
    return f"^asgd/{name}$" if name in OF_ALL_ONLY else rf"^asgd/(worker\d+/)?{name}$"


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """The workspace; nothing is sent yet."""
    sections = [
        workspaces.Section(
            name=section,
            is_open=True,
            panels=[
                panels.LinePlot(title=title, x=STEP, metric_regex=expression(name)) for title, name in charts.items()
            ],
        )
        for section, charts in SECTIONS.items()
    ]
    return workspaces.Workspace(entity=entity, project=project, name="A-SGD", sections=sections)


def main() -> None:
    parser = argparse.ArgumentParser(description="A workspace for A-SGD on Weights & Biases.")
    parser.add_argument("entity", help="your user name, or your team's")
    parser.add_argument("project")
    parser.add_argument("--print", action="store_true", help="print it, and send nothing")
    args = parser.parse_args()
    made = workspace(args.entity, args.project)
    if args.print:
        print(json.dumps(made._to_model().model_dump(by_alias=True, exclude_none=True), indent=1))
    else:
        made.save()
        print(made.url)


if __name__ == "__main__":
    main()
