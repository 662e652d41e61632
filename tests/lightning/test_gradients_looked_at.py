"""Which programs may see gradients before an optimizer's step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import pytest
import pytorch_lightning as pl

from lightning_asgd import ASGDMonitor
from lightning_asgd.core.lightning.class_trees import looks_at_gradients


def module_of(tree: Any, *callbacks: Any) -> Any:
    module = tree.LightningModule()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    module.trainer = tree.Trainer(accelerator="cpu", callbacks=list(callbacks), **quiet)
    return module


@pytest.mark.parametrize("tree", [pl, lightning], ids=lambda tree: tree.__name__)
def test_a_monitor_looks_at_none_with_either_tree_though_both_are_loaded(tree: Any) -> None:
    class Looks(tree.Callback):  # type: ignore[misc]
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            pass

    assert not looks_at_gradients(module_of(tree, ASGDMonitor()))
    assert looks_at_gradients(module_of(tree, Looks()))
