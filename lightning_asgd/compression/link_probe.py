"""``compression="auto"``: a worker measures its link to the servers and the codecs, and chooses its codec."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from lightning_asgd.compression import Cast, Compression, Float4, Int8
from lightning_asgd.compression.codes import NO_CODE, CodeCost, LinkSpeed, choose_code, expected_s
from lightning_asgd.compression.messages import LinkProbe, LinkProbed
from lightning_asgd.compression.streams import CodecState
from lightning_asgd.core.algorithms.compression import is_coded
from lightning_asgd.core.calls.shared_memory import host_identity
from lightning_asgd.core.foundation.layout import Layout, Role
from lightning_asgd.core.protocol import nbytes
from lightning_asgd.core.worker.connection import Connection

log = logging.getLogger(__name__)

_CODES: dict[str, Compression] = {"bf16": Cast("bfloat16"), "int8": Int8(), "4bit": Float4()}  # by what they lose
_MACHINES = 2  # with servers, to which links are measured
_SIZES = 1 << 15, 1 << 18, 1 << 21, 1 << 24  # bytes of probes
_SLOW_S = 0.06  # for a probe there and back: with the next size the four probes would take more than 1.5 s
_LEAST_S = 1e-4  # for less there is no telling bytes from noise
_VALUES = 1 << 20  # with which codecs are timed
_TIMINGS = 3


def measured_code(connection: Connection, layout: Layout) -> Compression | None:
    """The codec with which exchanges of this layout take the least time. Logs it, and why.

    All servers count as behind the slowest link that is measured, since a worker sends to them at the same time.
    """
    machines = _other_machines(connection)
    if not machines:
        log.info("compression='auto' on worker %d: no codec (all servers are on its machine).", connection.worker)
        return None
    shards = [layout.shard(server) for servers in machines for server in servers]
    values = sum(n for groups in shards for role, dtype, n in groups if is_coded(role, dtype))
    links = [_link_to(connection, servers[0]) for servers in machines[:_MACHINES]]
    link = max(links, key=lambda each: expected_s(NO_CODE, each, values))
    costs = _costs()
    chosen = choose_code(costs, link, values)
    log.info(
        "compression='auto' on worker %d: %s, because the link carries %.3g MB/s to the servers and %.3g MB/s back. An "
        "exchange is expected to take %s.",
        connection.worker,
        chosen.name,
        link.up / 1e6,
        link.down / 1e6,
        ", ".join(f"{expected_s(cost, link, values):.2g} s with {cost.name}" for cost in costs),
    )
    return _CODES.get(chosen.name)


# ---------------------------------------------------------------------- the link


def _other_machines(connection: Connection) -> list[list[int]]:
    """The servers that cannot share memory with this worker, by machine."""
    here, nothing = host_identity(), LinkProbe(*connection.sender, _random_bytes(0))
    futures = [connection.post(server, nothing) for server in connection.servers]
    found: dict[str, list[int]] = defaultdict(list)
    for server, future in enumerate(futures):
        probed: LinkProbed = connection.result(server, future)
        if probed.host != here or not here:
            found[probed.host].append(server)
    return list(found.values())


def _link_to(connection: Connection, server: int) -> LinkSpeed:
    """Measure the link to a server, with more and more bytes while they take little time."""
    latency_s = _probe_s(connection, server, _random_bytes(0))
    for size in _SIZES:
        payload = _random_bytes(size)
        there_s = max(_LEAST_S, _probe_s(connection, server, payload) - latency_s)
        both_s = _probe_s(connection, server, payload, echo=True) - latency_s
        link = LinkSpeed(latency_s, size / there_s, size / max(_LEAST_S, both_s - there_s))
        if both_s > _SLOW_S:
            break
    return link


def _probe_s(connection: Connection, server: int, payload: Tensor, *, echo: bool = False) -> float:
    """Seconds from a probe to its answer: the faster one of two, since other traffic may delay one."""
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        connection.ask(server, LinkProbe(*connection.sender, payload, echo))
        taken.append(time.perf_counter() - begun)
    return min(taken)


def _random_bytes(size: int) -> Tensor:
    """Bytes that no tunnel can compress. The program's own random numbers are left alone."""
    return torch.randint(256, (size,), dtype=torch.uint8, device="cpu", generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------- the codecs


def _costs() -> list[CodeCost]:
    """What the codecs cost on this machine, and no codec."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as servers have it
    try:
        return [NO_CODE, *(_cost_of(name, code) for name, code in _CODES.items())]
    finally:
        torch.set_num_threads(threads)


def _cost_of(name: str, code: Compression) -> CodeCost:
    """Do with random values what both ends of an exchange do with a codec."""
    groups = ((Role.PARAMETER, "float32", _VALUES),)
    worker, server = CodecState.of(code, groups), CodecState.of(code, groups)
    how: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the program's defaults are
    values = torch.randn(_VALUES, generator=torch.Generator().manual_seed(0), **how)
    weights, memory = (torch.zeros(_VALUES, **how),), (torch.empty(_VALUES, **how),)
    for end in (worker, server):
        end.weights.hold(weights)
    taken = []
    for _ in range(_TIMINGS):
        update = (values.clone(),)
        begun = time.perf_counter()
        pushed = worker.updates.encode(update)
        decoded = server.updates.decode(pushed, memory)
        fetched = server.weights.encode(decoded)
        worker.weights.decode(fetched, update)
        taken.append(time.perf_counter() - begun)
    return CodeCost(name, min(taken) / _VALUES, nbytes(pushed) / _VALUES, nbytes(fetched) / _VALUES)
