"""The example's workspace has a chart for every metric. It is built, not sent."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import pytorch_lightning.loggers

from lightning_asgd.monitor.metric_definitions import METRICS

EXAMPLE = Path(__file__).parents[2] / "examples" / "wandb_workspace.py"
LOGGED = {f"asgd/{name}" for name in (*METRICS, "workers/alive")}
LOGGED |= {f"asgd/worker{worker}/{name}" for worker in (0, 12) for name in METRICS}


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed")
    spec = importlib.util.spec_from_file_location("wandb_workspace", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def charts(example: Any) -> list[tuple[str, str, str]]:
    """Section, title and expression of every chart, as they would be sent."""
    model = example.workspace("team", "project")._to_model()
    bank = model.spec.section.panel_bank_config
    return [
        (section.name, panel.config.chart_title, panel.config.metric_regex)
        for section in bank.sections
        for panel in section.panels
    ]


def test_every_metric_is_in_one_chart_with_all_workers_of_it(example: Any) -> None:
    found = [name for *_, expression in charts(example) for name in LOGGED if re.search(expression, name)]
    assert sorted(found) == sorted(LOGGED)


def test_the_axis_is_what_this_lightning_logs(example: Any) -> None:
    logger = pytorch_lightning.loggers.WandbLogger(offline=True, experiment=(run := MagicMock()))
    logger.log_metrics({"loss": 1.0}, step=3)
    assert run.log.call_args[0][0][example.STEP] == 3
