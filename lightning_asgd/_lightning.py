"""The one place that imports Lightning, whichever of its two packages is there.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code as two separate class trees, so one has to be chosen:
the one the program has imported already, else the one that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

__all__ = [
    "PACKAGE",
    "Callback",
    "DDPStrategy",
    "LightningModule",
    "MultiProcessingLauncher",
    "ParallelStrategy",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "TorchElasticEnvironment",
    "TrainerFn",
    "apply_to_collection",
    "metrics_of",
    "optimizers_to_device",
    "rank_zero_warn",
    "reset_seed",
    "set_num_threads_if_needed",
]


def _choose() -> str:
    candidates = ("pytorch_lightning", "lightning.pytorch")
    for name in candidates:
        if name in sys.modules:
            return name
    for name in candidates:
        if importlib.util.find_spec(name.split(".")[0]) is not None:
            return name
    raise ImportError(
        "Lightning is not installed. Expected pytorch-lightning or lightning: pip install pytorch-lightning"
    )


PACKAGE = _choose()
_FABRIC = "lightning_fabric" if PACKAGE == "pytorch_lightning" else "lightning.fabric"


def _of(package: str, module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{package}.{module}" if module else package), name)


Callback: Any = _of(PACKAGE, "", "Callback")
LightningModule: Any = _of(PACKAGE, "", "LightningModule")
DDPStrategy: Any = _of(PACKAGE, "strategies", "DDPStrategy")
ParallelStrategy: Any = _of(PACKAGE, "strategies", "ParallelStrategy")
StrategyRegistry: Any = _of(PACKAGE, "strategies", "StrategyRegistry")
TrainerFn: Any = _of(PACKAGE, "trainer.states", "TrainerFn")
rank_zero_warn: Any = _of(PACKAGE, "utilities.rank_zero", "rank_zero_warn")
TorchElasticEnvironment: Any = _of(PACKAGE, "plugins.environments", "TorchElasticEnvironment")
# Private names: the launchers are extended, not replaced, and their neighbours come with them.
SubprocessScriptLauncher: Any = _of(PACKAGE, "strategies.launchers", "_SubprocessScriptLauncher")
MultiProcessingLauncher: Any = _of(PACKAGE, "strategies.launchers", "_MultiProcessingLauncher")
set_num_threads_if_needed: Any = _of(_FABRIC, "utilities.distributed", "_set_num_threads_if_needed")
optimizers_to_device: Any = _of(_FABRIC, "utilities.optimizer", "_optimizers_to_device")
reset_seed: Any = _of(_FABRIC, "utilities.seed", "reset_seed")
apply_to_collection: Any = importlib.import_module("lightning_utilities.core.apply_func").apply_to_collection


def metrics_of(module: Any) -> list[Any]:
    """Every torchmetrics ``Metric`` of a module."""
    import torchmetrics

    return [m for m in module.modules() if isinstance(m, torchmetrics.Metric)]
