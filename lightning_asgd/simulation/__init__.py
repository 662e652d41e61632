"""Whole runs in virtual time, in one thread: the same servers, workers and algorithms, without processes.

These are the same ``Service``, ``Shard``, ``SessionClient``, ``Exchanger`` and ``Replica``, real tensors and
optimizers. The same settings and seed give the same bits. What could block is a generator that stops where a worker
would wait. Not modelled: shared memory, processes that compete for cores, the start of a session. A server is busy with
a message for as long as ``ServerCosts`` say (``simulation/measured_costs.py``).

Example:
    >>> from lightning_asgd.simulation import LogNormal, Quadratic, Simulation
    >>> report = Simulation(problem=Quadratic(), workers=8, steps=50, speed=LogNormal(0.1, 0.3)).run()
    >>> report.loss < report.losses[0].loss
    True
"""

from __future__ import annotations

from lightning_asgd.plan.sizing import ServerCosts
from lightning_asgd.simulation.network import Link, Network
from lightning_asgd.simulation.problems import ModuleProblem, Problem, Quadratic
from lightning_asgd.simulation.report import Point, Report, WorkerReport
from lightning_asgd.simulation.run import Simulation
from lightning_asgd.simulation.speeds import Constant, Crash, LateWorker, LogNormal, Speed, Trace
from lightning_asgd.simulation.worker import LeasedData

__all__ = [
    "Constant",
    "Crash",
    "LateWorker",
    "LeasedData",
    "Link",
    "LogNormal",
    "ModuleProblem",
    "Network",
    "Point",
    "Problem",
    "Quadratic",
    "Report",
    "ServerCosts",
    "Simulation",
    "Speed",
    "Trace",
    "WorkerReport",
]
