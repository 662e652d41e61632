"""A job of :mod:`lightning_asgd.sizing` in virtual time, beside its closed forms."""

from __future__ import annotations

from lightning_asgd.core.foundation.settings import Advanced
from lightning_asgd.plan.sizing import Job
from lightning_asgd.simulation.network import Link, Network
from lightning_asgd.simulation.problems import Quadratic
from lightning_asgd.simulation.report import Report
from lightning_asgd.simulation.run import Simulation
from lightning_asgd.simulation.speeds import Constant


def forecast(job: Job, exchanges: int = 20) -> Report:
    """Simulate a job whose workers wait rather than take more than ``nsync`` steps between two exchanges.

    The ``nsync`` steps between two exchanges are one step of as many seconds here. Every server has one weight, and
    links are as much slower as the real parameters are larger.

    Args:
        job: the job to simulate.
        exchanges: of every worker.
    """
    weights = Quadratic(dimension=job.servers)
    scale = 4 * job.servers / (job.sent * job.parameter_bytes)  # simulated bytes for one that is sent
    speeds = (job.worker_gbit_s * 1e9 / 8 * scale, job.server_gbit_s * 1e9 / 8 * scale)
    return Simulation(
        problem=weights,
        workers=job.workers,
        servers=job.servers,
        steps=exchanges,
        exchange={"nsync": 1, "advanced": Advanced(max_offline_steps=1)},
        speed=Constant(job.period_s),
        network=Network(workers=Link(speeds[0], job.latency_s), servers=Link(speeds[1]), service_s=job.server_work_s),
        exchange_s=job.exchange_s,
    ).run()


def simulated_efficiency(job: Job, exchanges: int = 20) -> float:
    """Share of time in which simulated workers train, as :func:`lightning_asgd.sizing.efficiency` predicts it.

    Only the second half of a run counts: at first all workers exchange at once.

    Args:
        job: the job to simulate.
        exchanges: of every worker.

    Returns:
        between 0 and 1.
    """
    half, whole = forecast(job, exchanges // 2), forecast(job, exchanges)
    steps_s = (whole.steps - half.steps) * job.period_s
    merged = sum(w.exchanges for w in whole.workers) - sum(w.exchanges for w in half.workers)
    return steps_s / (steps_s + whole.wait_s - half.wait_s + merged * job.exchange_s)
