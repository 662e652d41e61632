r"""How many workers and servers, and how often to exchange: closed forms after Zou et al. (2017).

Notation, in the units of :class:`Job`: :math:`T` seconds of a step, :math:`n` steps between two exchanges, :math:`N`
workers, :math:`M` servers, :math:`S` bytes that an exchange sends one way, :math:`B_w` and :math:`B_s` bytes per second
and direction of a worker's and of a server's link, :math:`l` latency one way, :math:`c` seconds that an exchange takes
away from training. An exchange needs

* :math:`x = S / B_w` seconds on its worker's link, in each direction,
* :math:`y = S / (M B_s)` seconds on every server's link, in each direction,
* :math:`z` seconds of every server's work, some of them whatever its bytes are.

A server works on one exchange after the other. A link's two directions do not disturb each other, and the links of a
worker and a server work at the same time, so that the slower one sets the pace. :mod:`lightning_asgd.simulation`
assumes the same, and the tests compare the two.

References:
    Zou et al., "Distributed Training Large-Scale Deep Architectures" (2017), arXiv:1709.06622: the lemmas on the number
    of GPUs and on the number of parameter servers, and the procedure for the mini-batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.validation import at_least, whole


@dataclass(frozen=True, kw_only=True)
class ServerCosts:
    """Seconds of a core that a server works on a message.

    Args:
        claim_s: on a lease request.
        exchange_s: on an exchange, whatever its size.
        beat_s: on a heartbeat.
        contribution_s: on a worker's part in a collective.
        gbyte_s: GB of parameters that it receives, applies and sends back in a second.

    Raises:
        ConfigurationError: a value is out of range.
    """

    claim_s: float = 0.0
    exchange_s: float = 0.0
    beat_s: float = 0.0
    contribution_s: float = 0.0
    gbyte_s: float = math.inf

    def __post_init__(self) -> None:
        for field in fields(self):
            ends = field.name != "gbyte_s"
            at_least(f"ServerCosts({field.name})", getattr(self, field.name), 0, above=not ends, finite=ends)

    def exchange_of(self, nbytes: float) -> float:
        """Seconds of an exchange of some bytes of parameters."""
        return self.exchange_s + nbytes / (self.gbyte_s * 1e9)


@dataclass(frozen=True)
class Calibration:
    """What messages cost the servers of a machine, by the number of workers with which that was measured.

    Args:
        by_workers: the costs by number of workers.
        machine: which machine that was, for people.

    Raises:
        ConfigurationError: there are none, or a number of workers is no whole number of at least 1.
    """

    by_workers: Mapping[int, ServerCosts]
    machine: str

    def __post_init__(self) -> None:
        if not self.by_workers:
            raise ConfigurationError("Calibration(by_workers={}) is empty. Expected costs of a number of workers.")
        for workers in self.by_workers:
            whole("Calibration(by_workers)", workers)

    @property
    def most(self) -> int:
        """The largest number of workers that was measured."""
        return max(self.by_workers)

    def at(self, workers: int) -> ServerCosts | None:
        """What was measured with that many workers, or with the next larger number; None if neither was."""
        measured = min((n for n in self.by_workers if n >= workers), default=None)
        return None if measured is None else self.by_workers[measured]


# `lightning-asgd plan --measure` makes these figures; here with ZeroMQ, encrypted.
RECORDED = Calibration(
    {
        16: ServerCosts(claim_s=508e-6, exchange_s=635e-6, beat_s=322e-6, contribution_s=336e-6, gbyte_s=0.61),
        64: ServerCosts(claim_s=459e-6, exchange_s=650e-6, beat_s=322e-6, contribution_s=329e-6, gbyte_s=0.61),
        256: ServerCosts(claim_s=466e-6, exchange_s=647e-6, beat_s=322e-6, contribution_s=330e-6, gbyte_s=0.61),
        1024: ServerCosts(claim_s=480e-6, exchange_s=648e-6, beat_s=322e-6, contribution_s=333e-6, gbyte_s=0.61),
    },
    "a machine with two AMD EPYC cores",
)
"""What was measured once on one machine: another one may need half as long, or twice."""


__all__ = [
    "WORKER_VECTORS",
    "IslandMemory",
    "Job",
    "coordinated_cycle_s",
    "coordinator_use",
    "cycle_s",
    "efficiency",
    "hidden_nsync",
    "island_memory",
    "largest_overhead_ratio",
    "least_servers",
    "overhead_ratio",
    "recommended_batch_size",
    "round_trip_s",
    "server_link_use",
    "server_memory_bytes",
    "server_use",
    "steps_between_exchanges",
    "synchronous_efficiency",
    "worker_link_use",
    "worker_memory_bytes",
]

WORKER_VECTORS = 3  # base, wire, and what was fetched last: "Memory" in core/worker/__init__.py
STAGED_BYTES = 1 << 26  # on the device with offload, at most
_CLAIM_S = 0.5  # of work at most in a lease: `core/leases/self_scheduling.py`
_BEATS = 5  # in a failure timeout: `core/worker/session_client.py`
_ROUNDING = 1e-9  # of quotients that are whole numbers but for floating point


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job in numbers.

    Args:
        step_s: seconds of one optimizer step, exchanges not counted.
        parameter_bytes: bytes of the parameters, and of buffers that are averaged.
        workers: number of workers, all on other machines than the servers.
        servers: number of servers, each with a link of its own.
        nsync: optimizer steps between two exchanges.
        worker_gbit_s: speed of every worker's link in Gbit/s, in each direction. Workers that share a machine's link
            have a part of it each.
        server_gbit_s: the same of every server's link.
        latency_s: seconds of a small message from a worker to a server.
        sent: bytes that are sent one way, as a share of ``parameter_bytes``: below 1 with compression.
        exchange_s: seconds that training pauses per exchange, to pack an update and to merge a reply.
        server_gbyte_s: parameters that one server takes up and answers in a second, in GB.
        exchange_work_s: seconds that a server works on an exchange, however few its bytes are.
        bytes_per_parameter: 4 for float32. Of parameters with 2 bytes servers also hold a copy in float32.

    Raises:
        ConfigurationError: a value is out of range.
    """

    step_s: float
    parameter_bytes: float
    workers: int = 2
    servers: int = 1
    nsync: int = 10
    worker_gbit_s: float = math.inf
    server_gbit_s: float = math.inf
    latency_s: float = 0.0
    sent: float = 1.0
    exchange_s: float = 0.0
    server_gbyte_s: float = math.inf
    exchange_work_s: float = 0.0
    bytes_per_parameter: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name))

    @property
    def period_s(self) -> float:
        """Seconds of training between two exchanges, :math:`n T`."""
        return self.nsync * self.step_s

    @property
    def worker_transfer_s(self) -> float:
        """Seconds on a worker's link, one way: :math:`x`."""
        return self.sent * self.parameter_bytes / _bytes_per_s(self.worker_gbit_s)

    @property
    def server_transfer_s(self) -> float:
        """Seconds on a server's link, one way: :math:`y`."""
        return self.sent * self.parameter_bytes / (self.servers * _bytes_per_s(self.server_gbit_s))

    @property
    def server_work_s(self) -> float:
        """Seconds that a server works on an exchange: :math:`z`."""
        return self.exchange_work_s + self.parameter_bytes / (self.servers * self.server_gbyte_s * 1e9)


def round_trip_s(job: Job) -> float:
    r"""Seconds until an exchange is answered at the latest, whenever the other workers exchange.

    .. math:: 2 \max(x, y) + 2 (N - 1) y + N z + 2 l

    The worst case is that all begin at once and share the servers' links fairly, as TCP does: all updates are there
    after :math:`N y`, and the answers after as long again. A single worker's exchange takes
    :math:`2 \max(x, y) + z + 2 l`.

    Returns:
        seconds.
    """
    x, y, z = job.worker_transfer_s, job.server_transfer_s, job.server_work_s
    return 2 * max(x, y) + 2 * (job.workers - 1) * y + job.workers * z + 2 * job.latency_s


def cycle_s(job: Job) -> float:
    r"""Seconds between two exchanges of one worker, once the workers have fallen into step with what limits them.

    .. math:: \max(n T + c, \; 2 \max(x, y) + z + 2 l, \; N \max(y, z))

    A worker has one exchange in flight, so the next begins neither before its ``nsync`` steps are done nor before its
    own answer is there; and a server takes :math:`N` exchanges per cycle.

    Returns:
        seconds.
    """
    return max(job.period_s + job.exchange_s, _exposed_s(job))


def efficiency(job: Job) -> float:
    r"""Share of their time in which workers train, if the period is kept at ``nsync``: :math:`n T` / :func:`cycle_s`.

    With the ratio of exposed communication to computation :math:`R = T_O / T_C`, as Zou et al. have it, this is
    :math:`1 / (1 + R)`, where :math:`T_C = n T` and :math:`T_O` is the rest of the cycle. By default a worker does not
    wait but takes :func:`steps_between_exchanges`, and follows the others less closely instead.

    Returns:
        between 0 and 1.
    """
    return job.period_s / cycle_s(job)


def steps_between_exchanges(job: Job) -> int:
    r"""Steps that a worker takes between two exchanges where it trains on rather than wait, as it does by default.

    .. math:: \max(n, \lceil \max(2 \max(x, y) + z + 2 l, \; N \max(y, z)) / T \rceil)

    An exchange that falls due while the one before is in flight is deferred until that is answered.

    Returns:
        steps, at least ``nsync``.
    """
    return max(job.nsync, _ceil(_exposed_s(job) / job.step_s))


def hidden_nsync(job: Job) -> int:
    r"""The smallest ``nsync`` with no waiting for exchanges, whenever the other workers exchange.

    That is :func:`round_trip_s` / :math:`T`, rounded up. A little below it exchanges are exposed only where workers
    happen to exchange at the same time; below :func:`steps_between_exchanges` all of them are.

    Returns:
        steps, at least 1.
    """
    return max(1, _ceil(round_trip_s(job) / job.step_s))


def least_servers(job: Job) -> int | None:
    r"""The smallest number of servers that keeps exchanges hidden with the job's ``nsync``.

    :func:`round_trip_s` :math:`\leq n T`, solved for :math:`M`: with :math:`s = S / B_s`, :math:`z = w + q / M` and
    :math:`D = n T - 2 l - N w`, where :math:`w` seconds of a server's work do not depend on the bytes,

    .. math:: M \geq \max\left(\frac{N (2 s + q)}{D}, \frac{2 (N - 1) s + N q}{D - 2 x}\right)

    Where the servers' links are all that takes time this is the lemma of Zou et al. on the number of parameter servers,
    :math:`M \geq 2 S N / (B_s T)` (2 for push and fetch), for a period of :math:`n` steps instead of one.

    Returns:
        their number; None if no number will do, since a worker's own link, the latency, or the work that does not
        depend on the bytes takes too long.
    """
    one, workers = replace(job, servers=1, exchange_work_s=0.0), job.workers
    s, q = one.server_transfer_s, one.server_work_s
    beside_own = 2 * (workers - 1) * s + workers * q
    left_s = job.period_s - 2 * job.latency_s - workers * job.exchange_work_s
    beside_own_s = left_s - 2 * job.worker_transfer_s
    if left_s <= 0 or beside_own_s < 0 or (beside_own > 0 and beside_own_s == 0):
        return None
    return max(1, _ceil(workers * (2 * s + q) / left_s), _ceil(beside_own / beside_own_s) if beside_own else 1)


def server_link_use(job: Job) -> float:
    r"""Share of the time in which a server's link sends, and in which it receives: :math:`N y` / :func:`cycle_s`."""
    return job.workers * job.server_transfer_s / cycle_s(job)


def server_use(job: Job) -> float:
    r"""Share of the time in which a server works: :math:`N z` / :func:`cycle_s`."""
    return job.workers * job.server_work_s / cycle_s(job)


def coordinator_use(job: Job, costs: ServerCosts, silence_s: float = 10.0) -> float:
    r"""Share of a core that all messages to the coordinator take: its part of exchanges, lease requests, heartbeats.

    .. math:: N \left(\frac{z + k c_l}{C} + \frac{5 c_b}{\text{silence}}\right)

    with :math:`C` = :func:`coordinated_cycle_s`, :math:`k` lease requests per cycle, and five heartbeats of :math:`c_b`
    seconds in ``silence_s``.

    Args:
        job: the job.
        costs: what messages cost with that many workers.
        silence_s: see :class:`~lightning_asgd.Timeouts`.

    Returns:
        1 where the coordinator has no time left; more where heartbeats alone need more.
    """
    cycle, beats = coordinated_cycle_s(job, costs, silence_s), _BEATS * costs.beat_s / silence_s
    return job.workers * (_coordinators_s(job, costs) / cycle + beats)


def coordinated_cycle_s(job: Job, costs: ServerCosts, silence_s: float = 10.0) -> float:
    r"""Seconds from one exchange to the next with what the coordinator does besides: see :func:`coordinator_use`.

    .. math:: \max\left(C_0, \frac{N (z + k c_l)}{1 - 5 N c_b / \text{silence}}\right), \qquad
        k = \frac{n T}{\max(T, 0.5 s)}

    with :math:`C_0` = :func:`cycle_s`, and a lease request of :math:`c_l` seconds for every step, or for half a second
    of work if that is longer.

    Args:
        job: the job.
        costs: what messages cost with that many workers.
        silence_s: see :class:`~lightning_asgd.Timeouts`.

    Returns:
        infinity where the coordinator's core is too slow for the heartbeats alone.
    """
    left = 1 - job.workers * _BEATS * costs.beat_s / silence_s
    return max(cycle_s(job), job.workers * _coordinators_s(job, costs) / left) if left > 0 else math.inf


def _coordinators_s(job: Job, costs: ServerCosts) -> float:
    """Seconds of the coordinator per cycle and worker, heartbeats not counted."""
    return job.server_work_s + costs.claim_s * job.period_s / max(job.step_s, _CLAIM_S)


def worker_link_use(job: Job) -> float:
    r"""Share of the time in which a worker's link sends, and in which it receives: :math:`x` / :func:`cycle_s`."""
    return job.worker_transfer_s / cycle_s(job)


def worker_memory_bytes(job: Job) -> float:
    """Host memory of a worker beyond single-device training, in bytes: three vectors of the parameters' size."""
    return WORKER_VECTORS * job.parameter_bytes


def server_memory_bytes(job: Job) -> float:
    """Memory of a server at most, in bytes: its shard, and one of that size per worker whose exchange is in flight.

    Of 16-bit parameters also a copy in float32; what an algorithm keeps is not counted.
    """
    exact = 2 if job.bytes_per_parameter == 2 else 0
    return (1 + job.workers + exact) * job.parameter_bytes / job.servers


@dataclass(frozen=True)
class IslandMemory:
    """Bytes that one process of an island needs, activations not counted.

    Attributes:
        training: weights, gradients and the optimizer's state, on the device.
        exchange: what exchanges need on the device.
        exchange_offload: the same with ``offload``.
        host: what exchanges need of the host's memory.
        host_offload: the same with ``offload``.
    """

    training: float
    exchange: float
    exchange_offload: float
    host: float
    host_offload: float


def island_memory(
    parameters: float, devices: int, *, bytes_per_parameter: int = 4, state_vectors: int = 2
) -> IslandMemory:
    """Memory of a process where FSDP2 divides a model among the devices of an island, by counting vectors.

    Args:
        parameters: of the whole model.
        devices: of the island.
        bytes_per_parameter: 4 for float32.
        state_vectors: vectors of the optimizer's state: 2 for Adam, 1 for momentum.
    """
    at_least("parameters", parameters, 0, above=True, finite=True)
    whole("devices", devices)
    vector = parameters * bytes_per_parameter / devices
    return IslandMemory(
        training=(2 + state_vectors) * vector,
        exchange=2 * vector,  # the base, and the weights that arrive until they are merged
        exchange_offload=min(STAGED_BYTES, 2 * vector),
        host=2 * vector,  # the update, and the weights that arrive
        host_offload=3 * vector,
    )


def overhead_ratio(job: Job) -> float:
    r"""Ratio of communication to computation, :math:`R_O = 2 y / T`, of training in lock-step over the same servers.

    One worker pushes and fetches after every step, and nothing is hidden: what :func:`synchronous_efficiency` is for.
    """
    return 2 * job.server_transfer_s / job.step_s


def synchronous_efficiency(overhead_ratio: float, workers: int) -> float:
    r"""Efficiency of workers in lock-step: Zou et al., the lemma on the number of GPUs.

    A step of one worker takes :math:`T_C + T_O = T_C (1 + R_O)`. With :math:`G` of them the computation is done side by
    side and the overhead one after the other, :math:`T_C + G T_O`, for :math:`G` times the samples. So the speedup is
    :math:`G (1 + R_O) / (1 + G R_O)`, as Amdahl has it, and the efficiency

    .. math:: \alpha = \frac{1 + R_O}{1 + G R_O}

    Args:
        overhead_ratio: seconds of overhead that is not hidden, per second of computation, of one worker.
        workers: :math:`G`.

    Returns:
        speed relative to ``workers`` times that of one worker, between 0 and 1.
    """
    return (1 + overhead_ratio) / (1 + workers * overhead_ratio)


def largest_overhead_ratio(efficiency: float, workers: int) -> float:
    r"""The overhead ratio up to which workers in lock-step reach an efficiency: the same lemma, solved for :math:`R_O`.

    .. math:: R_O \leq \frac{1 - \alpha}{G \alpha - 1}

    Args:
        efficiency: :math:`\alpha`, above 0 and at most 1.
        workers: :math:`G`.

    Returns:
        seconds of overhead per second of computation; infinity where any overhead will do.
    """
    if workers * efficiency <= 1:
        return math.inf
    return (1 - efficiency) / (workers * efficiency - 1)


def recommended_batch_size(step_s: Mapping[int, float], within: float = 0.05) -> int:
    """The smallest batch size that is nearly as fast as the fastest.

    Zou et al. take the fastest of the batch sizes that converge well enough per sample. Smaller batches converge at
    least as well, so the smallest is taken of those that make no difference in speed.

    Args:
        step_s: seconds of a step by batch size, measured.
        within: what does not count as a difference, as a share of the most samples per second.

    Returns:
        one of the batch sizes.

    Raises:
        ConfigurationError: there are none.
    """
    if not step_s:
        raise ConfigurationError("step_s={} holds no batch size. Expected the seconds per step of at least one.")
    best = max(size / seconds for size, seconds in step_s.items())
    return min(size for size, seconds in step_s.items() if size / seconds >= (1 - within) * best)


def _exposed_s(job: Job) -> float:
    """Seconds between two exchanges of a worker, if it did not train."""
    alone = round_trip_s(replace(job, workers=1))
    return max(alone, job.workers * max(job.server_transfer_s, job.server_work_s))


_WHOLE = ("workers", "servers", "nsync")
_MAY_BE_ZERO = ("latency_s", "exchange_s", "exchange_work_s")
_MAY_BE_INFINITE = ("worker_gbit_s", "server_gbit_s", "server_gbyte_s")


def _check(name: str, value: float) -> None:
    if name in _WHOLE:
        whole(name, value)
    else:
        at_least(name, value, 0, above=name not in _MAY_BE_ZERO, finite=name not in _MAY_BE_INFINITE)


def _bytes_per_s(gbit_s: float) -> float:
    return gbit_s * 1e9 / 8


def _ceil(quotient: float) -> int:
    return math.ceil(quotient * (1 - _ROUNDING))
