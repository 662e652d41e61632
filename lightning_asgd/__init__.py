"""Asynchronous SGD for PyTorch Lightning, ``Trainer(strategy=ASGDStrategy())``, and for plain training loops.

The names that need Lightning are loaded when they are first used, so that server processes never import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_asgd.core.foundation.errors import ASGDError
from lightning_asgd.core.job import rank_variables
from lightning_asgd.core.lightning import class_trees, stepping_estimate, unattached

if TYPE_CHECKING:
    from lightning_asgd.caches.cache import CachedDataset
    from lightning_asgd.caches.shared_loader import SharedLoader
    from lightning_asgd.core.algorithms.config import Advanced, Timeouts
    from lightning_asgd.core.foundation.stats import ExchangeRecord, ExchangeStats
    from lightning_asgd.core.lightning.strategy import ASGDStrategy
    from lightning_asgd.data_stalls.stall_monitor import DataStallMonitor
    from lightning_asgd.loops.async_sgd import AsyncSGD
    from lightning_asgd.loops.fabric import FabricASGDStrategy
    from lightning_asgd.monitor.callback import ASGDMonitor
    from lightning_asgd.sampling.posterior import averaged_prediction
    from lightning_asgd.tables.served.embedding import ServedEmbedding

__all__ = [
    "ASGDError",
    "ASGDMonitor",
    "ASGDStrategy",
    "Advanced",
    "AsyncSGD",
    "CachedDataset",
    "DataStallMonitor",
    "ExchangeRecord",
    "ExchangeStats",
    "FabricASGDStrategy",
    "ServedEmbedding",
    "SharedLoader",
    "Timeouts",
    "__version__",
    "averaged_prediction",
]

__version__ = "0.1.0"

_LAZY = {
    "ASGDMonitor": "lightning_asgd.monitor.callback",
    "ASGDStrategy": "lightning_asgd.core.lightning.strategy",
    "Advanced": "lightning_asgd.core.algorithms.config",
    "AsyncSGD": "lightning_asgd.loops.async_sgd",
    "CachedDataset": "lightning_asgd.caches.cache",
    "DataStallMonitor": "lightning_asgd.data_stalls.stall_monitor",
    "ExchangeRecord": "lightning_asgd.core.foundation.stats",
    "ExchangeStats": "lightning_asgd.core.foundation.stats",
    "FabricASGDStrategy": "lightning_asgd.loops.fabric",
    "ServedEmbedding": "lightning_asgd.tables.served.embedding",
    "SharedLoader": "lightning_asgd.caches.shared_loader",
    "Timeouts": "lightning_asgd.core.algorithms.config",
    "averaged_prediction": "lightning_asgd.sampling.posterior",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


# Before any code asks Lightning for a rank: this process may be a program that a worker has started.
if rank_variables.detect():
    class_trees.forget_rank()


def _register(tree: class_trees.Tree) -> None:
    from lightning_asgd.core.lightning.strategy import ASGDStrategy
    from lightning_asgd.world import metric_sync
    from lightning_asgd.world import ranks as world

    tree.register(ASGDStrategy)
    class_trees.when_process_groups_are_made(tree, world.release_process_group)
    metric_sync.let_metrics_ask(world.collectives_are_real)  # also those that a program makes before it trains


def _register_with_fabric(tree: class_trees.Tree) -> None:
    from lightning_asgd.loops.fabric import FabricASGDStrategy

    tree.register_with_fabric(FabricASGDStrategy)


class_trees.when_imported("strategies", _register)
class_trees.when_imported("strategies", _register_with_fabric, class_trees.FABRICS)
class_trees.when_imported("trainer.connectors.accelerator_connector", unattached.let_several_trainers_take)
class_trees.when_imported("trainer.trainer", stepping_estimate.keep_estimate)
class_trees.when_imported("callbacks.callback", class_trees.CallbackExtension.join)
