"""``lightning-asgd plan``: how many workers and servers, and how often to exchange."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_asgd import sizing
from lightning_asgd.cli.console_tables import console, in_bytes, in_seconds, table
from lightning_asgd.cli.user_code import module_and_loader
from lightning_asgd.errors import ConfigurationError
from lightning_asgd.mini_batch import RECOMPUTED, Choice, check_solver, choose_ways
from lightning_asgd.report.picture_style import PAPER, SYSTEM_COLOURS, logarithmic, pyplot
from lightning_asgd.sizing import Job
from lightning_asgd.validation import at_least, whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["plan"]

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
    server_gbyte_s: float = math.inf,
    island: int = 0,
    simulate: int = 100,
    picture: Path | None = None,
) -> int:
    """Print how well a job scales, and what it needs.

    Describe the job by numbers (--parameters, --step-s, --batch-size), or give a LightningModule to measure (--module).

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
        server_gbyte_s: GB of parameters that a server can take in and send back per second.
        island: devices of an island, among which FSDP2 divides the model: what each device and its host need.
        simulate: largest number of workers to simulate.
        picture: PNG file for a picture of the scaling.
    """
    _check(locals())
    if (measured := None if module is None else _measured(module, batch_sizes or [], memory_gb)) is not None:
        parameters, bytes_per_parameter, (batch_size, step_s) = measured.parameter_bytes / 4, 4, measured.recommended
    given = _all_given(parameters=parameters, step_s=step_s, batch_size=batch_size)
    job = _job(locals() | given)
    output = _print(job, given["batch_size"], measured, simulate, picture)
    if island:
        output.print(_memory_of_islands(given["parameters"], bytes_per_parameter, island))
    return 0


def _check(given: dict[str, Any]) -> None:
    """Raise for what is out of range, by the names of the options (a job has others), and for what would be ignored."""
    for name in ("link_gbit_s", "worker_link_gbit_s", "bytes_per_parameter", "parameters", "batch_size"):
        if given[name] is not None:
            at_least(name, given[name], 0, above=True, finite=name in ("parameters", "batch_size"))
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
    names = "step_s", "workers", "servers", "nsync", "latency_s", "sent", "exchange_s", "server_gbyte_s"
    return Job(
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


def _print(job: Job, batch_size: int, measured: _Measured | None, simulate: int, picture: Path | None) -> Console:
    output = console()
    if measured is not None:
        output.print(_batches(measured, batch_size))
        if measured.choices:
            _print_choice(output, measured.choices[batch_size])
    simulated = _simulated(job, simulate)
    output.print(_answers(job, batch_size, simulated))
    output.print(_speeds(job, batch_size, simulated))
    output.print(_needs(job))
    if picture is not None:
        _draw(job, simulated, picture)
        output.print(f"picture: {picture}")
    return output


# ---------------------------------------------------------------------- a module that is measured


@dataclass(frozen=True)
class _Measured:
    parameter_bytes: int
    step_s: dict[int, float]  # by batch size
    choices: dict[int, Choice | None] = field(default_factory=dict)  # by batch size, if the memory is limited

    @property
    def recommended(self) -> tuple[int, float]:
        """A batch size, and seconds per step with it."""
        fitting = {size: choice.seconds for size, choice in self.choices.items() if choice is not None}
        if self.choices and not fitting:
            raise ConfigurationError(
                f"No batch size of {sorted(self.choices)} fits into --memory-gb, whichever layers are recomputed. "
                "Expected more memory, or smaller batches."
            )
        step_s = fitting or self.step_s
        size = sizing.recommended_batch_size(step_s)
        return size, step_s[size]


def _measured(reference: str, batch_sizes: list[int], memory_gb: float | None) -> _Measured:
    """Time a module's step with the batches of its loader, or with batches of these sizes."""
    from lightning_asgd.timing import TrainingStep, seconds_per_step

    module, loader = module_and_loader(reference)
    step = TrainingStep(module)
    batches = {size: _batch(loader, size) for size in batch_sizes} or {_size(loader): next(iter(loader))}
    tensors = [p for p in module.parameters() if p.requires_grad]
    tensors += [b for b in module.buffers() if b.is_floating_point()]
    exchanged = sum(t.nbytes for t in tensors)
    if memory_gb is None:
        return _Measured(exchanged, {size: seconds_per_step(step, batch) for size, batch in batches.items()})
    from torch import OutOfMemoryError

    from lightning_asgd.layer_profile import profile_step

    check_solver()
    beside = sizing.WORKER_VECTORS * exchanged if step.device.type == "cpu" else 0
    step_s: dict[int, float] = {}
    choices: dict[int, Choice | None] = {}
    for size, batch in batches.items():
        try:
            profile = profile_step(step, batch, beside)
        except OutOfMemoryError:
            step_s[size], choices[size] = math.nan, None
        else:
            step_s[size], choices[size] = profile.seconds, choose_ways(profile, memory_gb * 1e9)
    return _Measured(exchanged, step_s, choices)


def _size(loader: Any) -> int:
    if not loader.batch_size:
        raise ConfigurationError(f"{loader!r} has no batch_size. Expected a loader with one, or batch_sizes.")
    return int(loader.batch_size)


def _batch(loader: Any, size: int) -> Any:
    """The dataset's first samples, over and over if there are not enough."""
    from torch.utils.data import IterableDataset

    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError(
            f"{dataset!r} cannot be indexed, so batch_sizes={size} cannot be tried. Expected a map-style dataset."
        )
    return loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])


# ---------------------------------------------------------------------- tables


def _simulated(job: Job, most: int) -> dict[int, float]:
    """Simulated efficiency by number of workers."""
    if most < 1:
        return {}
    from lightning_asgd.simulation.forecast import simulated_efficiency

    numbers = sorted({w for w in (*_WORKERS, job.workers) if w <= most})
    return {w: simulated_efficiency(replace(job, workers=w)) for w in numbers}


def _batches(measured: _Measured, recommended: int) -> Table:
    limited = ("memory", "layers recomputed") if measured.choices else ()
    made = table("Batch size, measured", "samples", "seconds per step", "samples/s", *limited, "")
    for size, seconds in measured.step_s.items():
        mark = "recommended" if size == recommended and len(measured.step_s) > 1 else ""
        if measured.choices and (choice := measured.choices[size]) is None:
            why = "out of memory" if math.isnan(seconds) else "does not fit"
            made.add_row(f"{size:,}", "", "", why, "", "")
            continue
        cells: list[str] = []
        if measured.choices and choice is not None:
            seconds = choice.seconds
            cells = [in_bytes(choice.memory), f"{len(choice.named(RECOMPUTED))} of {len(choice.ways)}"]
        made.add_row(f"{size:,}", f"{seconds:.4g}", f"{size / seconds:,.0f}", *cells, mark)
    return made


def _print_choice(output: Any, choice: Choice | None) -> None:
    """Say how a module is made to recompute the layers that were chosen."""
    names = [] if choice is None else choice.named(RECOMPUTED)
    if names:
        output.print("\nTo recompute these layers, call this at the end of the module's __init__:\n")
        output.print("  from lightning_asgd.layer_profile import recompute")
        output.print(f"  recompute(self, {names})\n", soft_wrap=True)


def _answers(job: Job, batch_size: int, simulated: dict[int, float]) -> Table:
    servers = sizing.least_servers(job)
    ratio = sizing.overhead_ratio(job)
    rows = {
        "an exchange sends, each way": in_bytes(job.sent * job.parameter_bytes),
        "a step takes": in_seconds(job.step_s),
        "between two exchanges": f"{job.nsync} steps, {in_seconds(job.period_s)}",
        "an exchange is answered after": f"{in_seconds(sizing.round_trip_s(replace(job, workers=1)))} alone, "
        f"{in_seconds(sizing.round_trip_s(job))} at most",
        "efficiency, if nsync is kept": f"{sizing.efficiency(job):.1%}"
        + (f", simulated {simulated[job.workers]:.1%}" if job.workers in simulated else ""),
        "steps taken, if workers train on": f"{sizing.steps_between_exchanges(job):,}",
        "samples/s together, if nsync is kept": f"{_samples_per_s(job, batch_size):,.0f}",
        "efficiency in lock-step, nsync=1": f"{sizing.synchronous_efficiency(ratio, job.workers):.1%}",
        "communication / computation there": f"{ratio:.2g}",
        "smallest nsync that stays hidden": f"{sizing.hidden_nsync(job):,}",
        f"least servers with nsync={job.nsync}": _count(servers),
        "use of a worker's link": f"{sizing.worker_link_use(job):.1%} in each direction",
        "use of a server's link": f"{sizing.server_link_use(job):.1%} in each direction",
        "memory of a worker": f"{in_bytes(sizing.worker_memory_bytes(job))} beyond one device's",
        "memory of a server": f"{in_bytes(sizing.server_memory_bytes(job))} at most",
    }
    if not math.isinf(job.server_gbyte_s):
        rows["use of a server's processor"] = f"{sizing.server_use(job):.1%}"
    made = table(f"{_of(job.workers, 'worker')}, {_of(job.servers, 'server')}", "", "")
    for name, value in rows.items():
        made.add_row(name, value)
    return made


def _speeds(job: Job, batch_size: int, simulated: dict[int, float]) -> Table:
    return _by_workers(
        f"Speed with {_of(job.servers, 'server')} and nsync={job.nsync}",
        job,
        {
            "samples/s": lambda j: f"{_samples_per_s(j, batch_size):,.0f}",
            "efficiency": lambda j: f"{sizing.efficiency(j):.1%}",
            "simulated": lambda j: f"{simulated[j.workers]:.1%}" if j.workers in simulated else "",
            "in lock-step": lambda j: f"{sizing.synchronous_efficiency(sizing.overhead_ratio(j), j.workers):.1%}",
        },
    )


def _needs(job: Job) -> Table:
    return _by_workers(
        "What that takes",
        job,
        {
            "steps\ntaken": lambda j: f"{sizing.steps_between_exchanges(j):,}",
            "hidden\nnsync": lambda j: f"{sizing.hidden_nsync(j):,}",
            "least\nservers": lambda j: _count(sizing.least_servers(j)),
            "server's\nlink": lambda j: f"{sizing.server_link_use(j):.1%}",
            "server's\nmemory": lambda j: in_bytes(sizing.server_memory_bytes(j)),
        },
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


def _by_workers(title: str, job: Job, columns: dict[str, Callable[[Job], str]]) -> Table:
    made = table(title, "workers", *columns)
    for workers in sorted({*_WORKERS, job.workers}):
        cells = (cell(replace(job, workers=workers)) for cell in columns.values())
        made.add_row(f"{workers:,}", *cells, style="bold" if workers == job.workers else "")
    return made


def _samples_per_s(job: Job, batch_size: int) -> float:
    return job.workers * sizing.efficiency(job) * batch_size / job.step_s


def _count(servers: int | None) -> str:
    return "none" if servers is None else f"{servers:,}"


def _of(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


# ---------------------------------------------------------------------- picture


def _draw(job: Job, simulated: dict[int, float], file: Path) -> None:
    plt, asgd = pyplot(), SYSTEM_COLOURS["A-SGD"]
    numbers = sorted({round(10 ** (e / 20)) for e in range(81)})
    jobs = [replace(job, workers=n) for n in numbers]
    lock_step = [sizing.synchronous_efficiency(sizing.overhead_ratio(j), j.workers) for j in jobs]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(numbers, [sizing.efficiency(j) for j in jobs], color=asgd, label=f"A-SGD, nsync={job.nsync}")
    left.plot([*simulated], [*simulated.values()], "o", color=asgd, mfc="white", label="the same, simulated")
    left.plot(numbers, lock_step, "--", color=SYSTEM_COLOURS["DDP"], label="in lock-step, every step")
    left.set_ylabel("efficiency")
    left.set_ylim(0, 1.05)
    left.legend(loc="best")
    right.plot(numbers, [sizing.hidden_nsync(j) for j in jobs], color=asgd, label="smallest nsync that stays hidden")
    right.plot(
        numbers,
        [sizing.least_servers(j) or math.nan for j in jobs],
        "--",
        color=PAPER["green"],
        label=f"least servers with nsync={job.nsync}",
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
