"""``lightning-asgd plan``: how many workers and servers, and how often to exchange."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_asgd.cli.console_tables import console, in_bytes, in_seconds, table
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, whole
from lightning_asgd.plan import sizing
from lightning_asgd.plan.measured_module import MeasuredModule, batch_table, measure_module, print_choice
from lightning_asgd.plan.sizing import RECORDED, Calibration, Job
from lightning_asgd.report.picture_style import PAPER, SYSTEM_COLOURS, logarithmic, pyplot

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WORKERS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000)

_MODELS = (60e6, 1e9, 7e9, 13e9, 70e9)  # parameters


def plan(
    *,
    link_gbit_s: float,
    parameters: float | None = None,
    bytes_per_parameter: int = 4,
    step_s: float | None = None,
    batch_size: int | None = None,
    module: str | None = None,
    batch_sizes: list[int] | None = None,
    memory_gb: float | None = None,
    workers: int = 2,
    servers: int = 1,
    nsync: int = 10,
    worker_link_gbit_s: float | None = None,
    latency_s: float = 0.0,
    sent: float = 1.0,
    exchange_s: float = 0.0,
    server_gbyte_s: float | None = None,
    measure: bool = False,
    island: int = 0,
    simulate: int = 100,
    picture: Path | None = None,
) -> int:
    """Print how well a job scales, and what it needs.

    Describe the job by numbers (--parameters, --step-s, --batch-size), or give a LightningModule to measure (--module).
    Memory is counted. Times follow from what messages cost the servers, and end where that was not measured.

    Args:
        link_gbit_s: speed of a server's link in Gbit/s, in each direction.
        parameters: number of parameters.
        bytes_per_parameter: bytes per parameter, 4 for float32.
        step_s: seconds of one optimizer step.
        batch_size: samples per step of one worker.
        module: what to measure, as package.module:Class or script.py:Class: a LightningModule that is created without
            arguments and has a train_dataloader, or a function that returns a module and a loader.
        batch_sizes: batch sizes to measure the module with, to recommend one. Needs a map-style dataset.
        memory_gb: memory of a worker's device in GB; what would not fit is recomputed in backward. Needs scipy.
        workers: number of workers, on other machines than the servers.
        servers: number of servers, each with a link of its own.
        nsync: optimizer steps between two exchanges.
        worker_link_gbit_s: speed of a worker's link. The default is that of a server's.
        latency_s: seconds of a small message, one way.
        sent: share of the parameters' bytes that is sent, such as 0.5 with bf16.
        exchange_s: seconds that training pauses for each exchange.
        server_gbyte_s: GB of parameters that a server can take in and send back per second. The default is measured.
        measure: measure what messages cost a server on this machine, which takes some 15 seconds.
        island: devices of an island, among which FSDP2 divides the model: what each device and its host need.
        simulate: largest number of workers to simulate.
        picture: PNG file for a picture of the scaling.
    """
    _check(locals())
    if (measured := None if module is None else measure_module(module, batch_sizes or [], memory_gb)) is not None:
        parameters, bytes_per_parameter, (batch_size, step_s) = measured.parameter_bytes / 4, 4, measured.recommended
    given = _all_given(parameters=parameters, step_s=step_s, batch_size=batch_size)
    scaling = _Scaling(_job(locals() | given), _calibration() if measure else RECORDED)
    output = _print(scaling, given["batch_size"], measured, simulate, picture)
    if island:
        output.print(_memory_of_islands(given["parameters"], bytes_per_parameter, island))
    return 0


def _check(given: dict[str, Any]) -> None:
    """Raise for what is out of range, by the names of the options (a job has others), and for what would be ignored."""
    console()  # it may lack a package, and a measurement takes long
    if given["picture"] is not None:
        pyplot()
    for name in ("link_gbit_s", "worker_link_gbit_s", "bytes_per_parameter", "parameters", "batch_size"):
        if given[name] is not None:
            at_least(name, given[name], 0, above=True, finite=name in ("parameters", "batch_size"))
    if given["server_gbyte_s"] is not None:
        at_least("server_gbyte_s", given["server_gbyte_s"], 0, above=True, finite=True)
    whole("simulate", given["simulate"], 0)
    whole("island", given["island"], 0)
    if given["memory_gb"] is not None:
        at_least("memory_gb", given["memory_gb"], 0, above=True)
        if given["module"] is None:
            raise ConfigurationError("--memory-gb was given without a module to measure. Expected --module, too.")
    for size in given["batch_sizes"] or ():
        whole("batch_sizes", size)
    if given["module"] is None and given["batch_sizes"]:
        raise ConfigurationError("--batch-sizes were given without a module to measure. Expected --module, too.")
    ignored = [name for name in ("parameters", "step_s", "batch_size") if given[name] is not None]
    if given["module"] is not None and ignored:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise ConfigurationError(f"{names} and --module were given. Expected numbers, or a module to measure.")


def _job(given: dict[str, Any]) -> Job:
    link = given["link_gbit_s"]
    names = "step_s", "workers", "servers", "nsync", "latency_s", "sent", "exchange_s", "bytes_per_parameter"
    return Job(
        server_gbyte_s=given["server_gbyte_s"] or math.inf,
        parameter_bytes=given["parameters"] * given["bytes_per_parameter"],
        worker_gbit_s=given["worker_link_gbit_s"] or link,
        server_gbit_s=link,
        **{name: given[name] for name in names},
    )


def _all_given(**numbers: Any) -> dict[str, Any]:
    """The numbers of a job. Raises if one is missing."""
    if None in numbers.values():
        missing = ", ".join(f"--{name.replace('_', '-')}" for name, value in numbers.items() if value is None)
        raise ConfigurationError(
            f"{missing} not given. Expected --parameters, --step-s and --batch-size, or a module to measure: "
            "--module package.module:Class."
        )
    return numbers


@dataclass(frozen=True)
class _Scaling:
    """A job with other numbers of workers, where their cost to the servers has been measured."""

    job: Job
    calibration: Calibration

    def at(self, workers: int) -> Job | None:
        """The job with that many workers, and what exchanges cost the servers then; None if that was not measured."""
        costs = self.calibration.at(workers)
        if costs is None:
            return None
        gbyte_s = costs.gbyte_s if math.isinf(self.job.server_gbyte_s) else self.job.server_gbyte_s
        return replace(self.job, workers=workers, exchange_work_s=costs.exchange_s, server_gbyte_s=gbyte_s)

    def coordinator_use(self, job: Job) -> float:
        """Share of a core that the coordinator needs."""
        costs = self.calibration.at(job.workers)
        return math.nan if costs is None else sizing.coordinator_use(job, costs)

    def efficiency(self, job: Job) -> float:
        """Share of time in which workers train: at most as much as the coordinator allows."""
        costs = self.calibration.at(job.workers)
        return math.nan if costs is None else job.period_s / sizing.coordinated_cycle_s(job, costs)

    @property
    def limit(self) -> str:
        """Up to where times are known."""
        return f"not calibrated beyond {self.calibration.most:,} workers"


def _calibration() -> Calibration:
    from lightning_asgd.simulation.measured_costs import measure

    return measure()


def _print(
    scaling: _Scaling, batch_size: int, measured: MeasuredModule | None, simulate: int, picture: Path | None
) -> Console:
    output = console()
    if measured is not None:
        output.print(batch_table(measured, batch_size))
        if measured.choices:
            print_choice(output, measured.choices[batch_size])
    simulated = _simulated(scaling, simulate)
    output.print(f"{_verdict(scaling)}\n")
    output.print(_answers(scaling, batch_size, simulated))
    output.print(_costs(scaling))
    output.print(_speeds(scaling, batch_size, simulated))
    output.print(_needs(scaling))
    advice = ["--measure measures this machine."] if scaling.calibration is RECORDED else []
    output.print(f"Times: {scaling.limit}.", *advice)
    if picture is not None:
        _draw(scaling, simulated, picture)
        output.print(f"picture: {picture}")
    return output


# ---------------------------------------------------------------------- tables


def _simulated(scaling: _Scaling, most: int) -> dict[int, float]:
    """Simulated efficiency by number of workers."""
    if most < 1:
        return {}
    from lightning_asgd.simulation.forecast import simulated_efficiency

    jobs = [scaling.at(w) for w in sorted({*_WORKERS, scaling.job.workers}) if w <= most]
    return {job.workers: simulated_efficiency(job) for job in jobs if job is not None}


def _verdict(scaling: _Scaling) -> str:
    job, who = scaling.at(scaling.job.workers), _of(scaling.job.workers, "worker")
    if job is None:
        return f"Times for {who} are not known: {scaling.limit}."
    servers, nsync = sizing.least_servers(job), sizing.hidden_nsync(job)
    each = "one server's" if job.servers == 1 else "each server's"
    of_server = (sizing.server_use(job), f"{each} core"), (sizing.server_link_use(job), f"{each} link")
    use, busy = max(*of_server, (sizing.worker_link_use(job), "their links"))
    if nsync > job.nsync:
        late = f"Exchanges of {who} may take longer than {_of(job.nsync, 'step')}"
        why = f"{who} keep {busy} {100 * use:.0f} % busy" if use > 0.95 else late
        return f"{why}: use {'' if servers is None else f'{servers:,} servers or '}nsync={nsync:,}."
    if scaling.coordinator_use(job) >= 1:
        return f"{who} keep the coordinator's core 100 % busy: use fewer workers, or larger batches."
    return f"No change is needed: exchanges of {who} are hidden behind {_of(job.nsync, 'step')}."


def _answers(scaling: _Scaling, batch_size: int, simulated: dict[int, float]) -> Table:
    given, job = scaling.job, scaling.at(scaling.job.workers)
    rows = {
        "an exchange sends, each way": in_bytes(given.sent * given.parameter_bytes),
        "a step takes": in_seconds(given.step_s),
        "between two exchanges": f"{given.nsync} steps, {in_seconds(given.period_s)}",
        **({"times": scaling.limit} if job is None else _times(scaling, job, batch_size, simulated)),
        "memory of a worker": f"{in_bytes(sizing.worker_memory_bytes(given))} beyond one device's",
        "memory of a server": f"{in_bytes(sizing.server_memory_bytes(given))} at most",
    }
    made = table(f"{_of(given.workers, 'worker')}, {_of(given.servers, 'server')}", "", "")
    for name, value in rows.items():
        made.add_row(name, value)
    return made


def _times(scaling: _Scaling, job: Job, batch_size: int, simulated: dict[int, float]) -> dict[str, str]:
    """What follows from the time that exchanges take."""
    ratio, efficiency = sizing.overhead_ratio(job), scaling.efficiency(job)
    return {
        "an exchange is answered after": f"{in_seconds(sizing.round_trip_s(replace(job, workers=1)))} alone, "
        f"{in_seconds(sizing.round_trip_s(job))} at most",
        "efficiency, if nsync is kept": f"{efficiency:.1%}"
        + (f", simulated {simulated[job.workers]:.1%}" if job.workers in simulated else ""),
        "actual steps between exchanges": f"{sizing.steps_between_exchanges(job):,}",
        "samples/s together, if nsync is kept": f"{_samples_per_s(scaling, job, batch_size):,.0f}",
        "efficiency in lock-step, nsync=1": f"{sizing.synchronous_efficiency(ratio, job.workers):.1%}",
        "communication/computation ratio, nsync=1": f"{ratio:.2g}",
        "smallest nsync with no waiting": f"{sizing.hidden_nsync(job):,}",
        f"minimum servers with nsync={job.nsync}": _count(sizing.least_servers(job)),
        "use of a worker's link": f"{sizing.worker_link_use(job):.1%} in each direction",
        "use of a server's link": f"{sizing.server_link_use(job):.1%} in each direction",
        "use of a server's core": f"{sizing.server_use(job):.1%}, coordinator's {scaling.coordinator_use(job):.1%}",
    }


def _costs(scaling: _Scaling) -> Table:
    """What was measured."""
    calibration, headings = scaling.calibration, ("lease", "exchange", "heartbeat", "GB/s")
    made = table(f"Milliseconds of a server's core, {calibration.machine}", "workers", *headings)
    for workers, costs in sorted(calibration.by_workers.items()):
        cells = (f"{1000 * s:.2f}" for s in (costs.claim_s, costs.exchange_s, costs.beat_s))
        made.add_row(f"{workers:,}", *cells, f"{costs.gbyte_s:.2f}")
    return made


def _speeds(scaling: _Scaling, batch_size: int, simulated: dict[int, float]) -> Table:
    return _by_workers(
        f"Speed with {_of(scaling.job.servers, 'server')} and nsync={scaling.job.nsync}",
        scaling,
        {
            "samples/s": lambda j: f"{_samples_per_s(scaling, j, batch_size):,.0f}",
            "efficiency": lambda j: f"{scaling.efficiency(j):.1%}",
            "simulated": lambda j: f"{simulated[j.workers]:.1%}" if j.workers in simulated else "",
            "coordinator": lambda j: f"{scaling.coordinator_use(j):.1%}",
            "in lock-step": lambda j: f"{sizing.synchronous_efficiency(sizing.overhead_ratio(j), j.workers):.1%}",
        },
    )


def _needs(scaling: _Scaling) -> Table:
    return _by_workers(
        "What is needed",
        scaling,
        {
            "actual\nsteps": lambda j: f"{sizing.steps_between_exchanges(j):,}",
            "nsync, no\nwaiting": lambda j: f"{sizing.hidden_nsync(j):,}",
            "minimum\nservers": lambda j: _count(sizing.least_servers(j)),
            "server's\nlink": lambda j: f"{sizing.server_link_use(j):.1%}",
        },
        lambda j: in_bytes(sizing.server_memory_bytes(j)),
    )


def _memory_of_islands(mine: float, bytes_per_parameter: int, devices: int) -> Table:
    """What each device of an island needs, of the planned model and of others."""
    title = f"Memory per device, an island of {_of(devices, 'device')}, FSDP2 and Adam, without activations"
    made = table(title, "parameters", "training", "exchanges", "with\noffload", "host", "host with\noffload")
    for parameters in sorted({mine, *_MODELS}):
        need = sizing.island_memory(parameters, devices, bytes_per_parameter=bytes_per_parameter)
        cells = (need.training, need.exchange, need.exchange_offload, need.host, need.host_offload)
        made.add_row(_short(parameters), *map(in_bytes, cells), style="bold" if parameters == mine else "")
    return made


def _short(number: float) -> str:
    """A number of parameters: ``"60 M"``, ``"7 B"``."""
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def _by_workers(
    title: str, scaling: _Scaling, times: dict[str, Callable[[Job], str]], memory: Callable[[Job], str] | None = None
) -> Table:
    """Times by number of workers, as far as they are known, and memory."""
    made = table(title, "workers", *times, *(() if memory is None else ("server's\nmemory",)))
    for workers in sorted({*_WORKERS, scaling.job.workers}):
        job = scaling.at(workers)
        if job is None and memory is None:
            continue
        cells = ["" for _ in times] if job is None else [cell(job) for cell in times.values()]
        if memory is not None:
            cells.append(memory(replace(scaling.job, workers=workers)))
        made.add_row(f"{workers:,}", *cells, style="bold" if workers == scaling.job.workers else "")
    return made


def _samples_per_s(scaling: _Scaling, job: Job, batch_size: int) -> float:
    return job.workers * scaling.efficiency(job) * batch_size / job.step_s


def _count(servers: int | None) -> str:
    return "none" if servers is None else f"{servers:,}"


def _of(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


# ---------------------------------------------------------------------- picture


def _draw(scaling: _Scaling, simulated: dict[int, float], file: Path) -> None:
    plt, asgd, job = pyplot(), SYSTEM_COLOURS["A-SGD"], scaling.job
    asked = (scaling.at(n) for n in sorted({round(10 ** (e / 20)) for e in range(81)}))
    jobs = [each for each in asked if each is not None]
    numbers = [each.workers for each in jobs]
    lock_step = [sizing.synchronous_efficiency(sizing.overhead_ratio(j), j.workers) for j in jobs]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.8), layout="constrained")
    left.plot(numbers, [scaling.efficiency(j) for j in jobs], color=asgd, label=f"A-SGD, nsync={job.nsync}")
    left.plot([*simulated], [*simulated.values()], "o", color=asgd, label="the same, simulated")
    left.plot(numbers, lock_step, "--", color=SYSTEM_COLOURS["DDP"], label="in lock-step, every step")
    left.set_ylabel("efficiency")
    left.set_ylim(0, 1.05)
    left.legend(loc="best")
    right.plot(numbers, [sizing.hidden_nsync(j) for j in jobs], color=asgd, label="smallest nsync with no waiting")
    right.plot(
        numbers,
        [sizing.least_servers(j) or math.nan for j in jobs],
        "--",
        color=PAPER["green"],
        label=f"minimum servers with nsync={job.nsync}",
    )
    right.legend(loc="upper left")
    logarithmic(right)
    for axis in (left, right):
        logarithmic(axis, "x")
        axis.set_xlabel("workers")
        axis.axvline(job.workers, color=PAPER["rest"], linewidth=1, zorder=0)
    sent = in_bytes(job.sent * job.parameter_bytes)
    figure.suptitle(f"{sent} each way, {in_seconds(job.step_s)} per step, {_of(job.servers, 'server')}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"picture={str(file)!r}: {error}. Expected a file that ends in .png.") from error
    plt.close(figure)
