"""Training on a Ray cluster: Ray places and restarts the processes, and this package trains.

:class:`ASGDTrainer` runs a training function on workers that Ray may start, restart, add and remove at any time.
:class:`ASGDConfig` is for Ray Train's own ``TorchTrainer``. Both need ``pip install '.[ray]'``.

A run of ``ASGDTrainer`` (``ray/trainer.py``) is an elastic run whose processes are actors. The driver hosts the
rendezvous. Each ``ServerActor`` supervises one server process. Ray restarts an actor whose node is lost; the server
publishes itself as successor, and the workers restore its state. They wait for it without end, because the driver ends
the run if Ray gives a server up. A restarted ``WorkerActor`` joins as a new worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_asgd.ray.reports import ReportCallback, get_checkpoint, report_metrics
from lightning_asgd.ray.trainer import ASGDRun, ASGDTrainer

if TYPE_CHECKING:
    from lightning_asgd.ray.torch_trainer import ASGDConfig, RayASGDStrategy

__all__ = [
    "ASGDConfig",
    "ASGDRun",
    "ASGDTrainer",
    "RayASGDStrategy",
    "ReportCallback",
    "get_checkpoint",
    "report_metrics",
]


def __getattr__(name: str) -> Any:
    if name in ("ASGDConfig", "RayASGDStrategy"):  # they import Lightning, which servers do without
        from lightning_asgd.ray import torch_trainer

        return getattr(torch_trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
