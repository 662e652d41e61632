"""Training on a Ray cluster: Ray places and restarts the processes, and this package trains.

:class:`ASGDTrainer` runs a training function on workers that Ray may start, restart, add and remove at any time.
:class:`ASGDConfig` is for Ray Train's own ``TorchTrainer``. Both need ``pip install 'lightning-asgd[ray]'``.
"""

from __future__ import annotations

from lightning_asgd.ray.report import ReportCallback, get_checkpoint, report
from lightning_asgd.ray.torch_trainer import ASGDConfig, RayASGDStrategy
from lightning_asgd.ray.trainer import ASGDRun, ASGDTrainer

__all__ = [
    "ASGDConfig",
    "ASGDRun",
    "ASGDTrainer",
    "RayASGDStrategy",
    "ReportCallback",
    "get_checkpoint",
    "report",
]
