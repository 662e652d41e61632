"""How a worker enters a session: one layout for all, the chief's weights on the servers and on every worker."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_asgd.core.algorithms.base import Algorithm, Payload
from lightning_asgd.core.algorithms.compression import Compression, is_coded
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.calls import shared_memory
from lightning_asgd.core.foundation.errors import ConfigurationError, LayoutMismatchError
from lightning_asgd.core.foundation.layout import Layout, Role, build_layout, dense, nbytes_of
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.connection import Connection
from lightning_asgd.core.worker.exchanger import Exchanger
from lightning_asgd.core.worker.module_state import digest_of, fixed_tensors, make_identical, persistent_buffers
from lightning_asgd.core.worker.replica import Replica
from lightning_asgd.core.worker.replica_kinds import replica_for
from lightning_asgd.core.worker.replica_spans import Place, places_of
from lightning_asgd.core.worker.session_client import SessionClient
from lightning_asgd.core.worker.shard_client import ShardClient
from lightning_asgd.core.worker.synchronizer import Synchronizer, Training, run
from lightning_asgd.features import SYNCHRONIZERS, load

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """What a worker knows of its session when it enters."""

    versions: list[int] | None = None  # per server, the first versions; those of the first worker are used
    fill: bool | None = None  # whether to send this worker's weights to the servers; None: if it is the chief
    layout: Any = None  # description of the layout on the servers; None if they have none
    constants: bytes | None = None  # digest of what each worker keeps as the chief had it, where the others train
    again: bool = False  # whether these workers have trained before, so that buffers are their own already


@dataclass(frozen=True)
class Entry:
    """What a way to share weights without exchanges gets when a worker enters; see ``features.SYNCHRONIZERS``."""

    connection: Connection
    collectives: Collectives
    module: Module
    algorithm: Algorithm
    layout: Layout
    training: Training


def set_up(
    client: SessionClient,
    collectives: Collectives,
    module: Module,
    config: ExchangeConfig,
    training: Training | None = None,
    start: Start | None = None,
) -> Synchronizer:
    """Lay the module out over the servers, fill them with the first worker's weights, and take these.

    All workers call it together; the module is changed in place. Raises a :class:`ConfigurationError` if the module has
    no trainable parameter, or one without a shape yet, and a :class:`LayoutMismatchError` that names the first
    parameter in which modules differ.
    """
    start, training = start or Start(), training or Training()
    check_shapes(module)
    trainable = trainable_parameters(module)
    algorithm, num_servers = config.algorithm, len(client.connection.servers)
    alone = algorithm.payload is Payload.NONE  # no server holds a part of the weights
    tables = tables_of(module) if algorithm.by_rows else ()
    layout = build_layout(trainable.items(), 1 if alone else num_servers, tables)
    if start.layout is None:
        _check_same(collectives, layout, client.connection.worker)
    else:
        layout.check_same(start.layout, f"worker {client.connection.worker}", "the run")
    digest = _take_first_values(collectives, module, fixed_tensors(module, trainable), start, client.connection.worker)
    if algorithm.payload.value in SYNCHRONIZERS:
        entry = Entry(client.connection, collectives, module, algorithm, layout, training)
        connected: Synchronizer = load(SYNCHRONIZERS[algorithm.payload.value])(entry)
        return connected
    parts, code = fragments_of(trainable, algorithm.fragments, num_servers, tables), config.compression
    warn_if_fewer(algorithm, len(parts))
    if code is not None:
        code = code.chosen(client.connection, max(parts, key=lambda part: part.nbytes))
    _warn_if_unused(code, parts)
    places = [places_of(module, part) for part in parts]
    chief = None
    while chief != collectives.chief:  # else it died before it had brought the weights
        chief = collectives.chief
        about = start if start.fill is not None else replace(start, fill=collectives.rank == chief)
        filled = [_fill(client, places[number], config, code, about, part, number) for number, part in enumerate(parts)]
        collectives.barrier("servers have the weights")
    exchanger = Exchanger(layout, filled, config, training)
    run(exchanger.fetch(together=start.layout is None))
    exchanger.constants, exchanger.stats = digest, ExchangeStats()
    return exchanger


def _take_first_values(
    collectives: Collectives, module: Module, constants: Mapping[str, Tensor], start: Start, worker: int
) -> bytes:
    """Take the chief's untrained tensors; returns a digest of those that each worker keeps for itself from then on."""
    if start.again:
        return digest_of(constants)
    digest = make_identical(collectives, module, constants)
    make_identical(collectives, module, persistent_buffers(module))
    return digest if start.constants is None else _check_constants(constants, start.constants, worker)


def check_shapes(module: Module) -> None:
    """Raise a :class:`ConfigurationError` for a parameter without a shape."""
    for name, tensor in module.named_parameters():
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigurationError(
                f"Parameter {name!r} has no shape yet, because it belongs to a lazy module. Expected all shapes to be "
                "known when fit begins: run a batch through the module in configure_model()."
            )


def trainable_parameters(module: Module) -> dict[str, Tensor]:
    """The module's parameters that are exchanged: those without elements hold nothing."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad and p.numel()}


def _check_code(algorithm: Algorithm, part: Layout) -> None:
    """Raise a :class:`ConfigurationError` if an algorithm's own codec does not suit the parameters."""
    plain = {dtype for role, dtype, _ in part.shard(0) if role is Role.PARAMETER and not is_coded(role, dtype)}
    if algorithm.code is not None and plain:
        raise ConfigurationError(
            f"algorithm={type(algorithm).__name__} was given with parameters in {', '.join(sorted(plain))}. Expected "
            "float32, which it compresses, as with precision='bf16-mixed'."
        )


def warn_if_fewer(algorithm: Algorithm, fragments: int) -> None:
    """Warn if there are fewer fragments than the algorithm expects."""
    if fragments < algorithm.fragments:
        log.warning(
            "%s(parts=%d) was given, but the module has parameters for only %d parts, because none is split. "
            "Set parts=%d: the algorithm divides its period by this number.",
            type(algorithm).__name__,
            algorithm.fragments,
            fragments,
            fragments,
        )


def _warn_if_unused(code: Compression | None, parts: Sequence[Layout]) -> None:
    if code is None:
        return
    sizes = {True: 0, False: 0}  # bytes, by whether they are coded
    others = set()
    for role, dtype, number in (group for part in parts for group in part.shard(0)):
        coded = is_coded(role, dtype)
        sizes[coded] += nbytes_of(((role, dtype, number),))
        if not coded:
            others.add(dtype if role is Role.PARAMETER else "tables of rows")
    if others and sizes[True] < sizes[False]:
        log.warning(
            "compression=%r %s: it compresses parameters in float32, as with precision='bf16-mixed', or in float64, "
            "and finds %s.",
            code,
            "compresses less than half of the weights" if sizes[True] else "has no effect",
            ", ".join(sorted(others)),
        )


def _fill(
    client: SessionClient,
    places: Sequence[Place],
    config: ExchangeConfig,
    code: Compression | None,
    start: Start,
    part: Layout,
    number: int,
) -> tuple[ShardClient, Replica]:
    """Allocate one fragment's shards, and fill them if this worker brings the weights."""
    algorithm, connection = config.algorithm, client.connection
    _check_code(algorithm, part)
    # What passes through shared memory is not coded, and another machine's server could not map the block.
    apart = connection.servers if algorithm.code is not None else connection.moving if config.restorable else ()
    blocks = [None if s in apart else shared_memory.create(dense(part.shard(s))) for s in connection.servers]
    remembers = config.restorable and connection.world_size != 1
    how = {"remembers": remembers, "offload": config.offload}
    replica = replica_for(algorithm, part, places, blocks, **how)
    shards = ShardClient(client, number, restorable=remembers)
    seen = shards.initialise(
        part,
        algorithm,
        [block.ref if block is not None else None for block in blocks],
        weights=replica.weights() if start.fill else None,
        versions=start.versions if start.fill else None,
        compression=code,
    )
    for server, sees in enumerate(seen):
        if not sees:
            replica.drop_block(server)
    return shards, replica


def fragments_of(
    parameters: Mapping[str, Tensor], number: int, num_servers: int, tables: Collection[str] = ()
) -> list[Layout]:
    """One layout per fragment: each parameter, the largest first, is in the smallest. Tables count as nothing."""
    number = min(number, len(parameters))
    sizes = {name: 0 if name in tables else parameter.numel() for name, parameter in parameters.items()}
    dealt: list[list[str]] = [[] for _ in range(number)]
    filled = [0] * number
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        least = min(range(number), key=lambda k: (filled[k], len(dealt[k])))
        dealt[least].append(name)
        filled[least] += sizes[name]
    named = [[(name, parameter) for name, parameter in parameters.items() if name in part] for part in map(set, dealt)]
    return [build_layout(part, num_servers, tables) for part in named]


def tables_of(module: Module) -> list[str]:
    """Names of the weights of which a batch has gradients for some rows only, as with ``nn.Embedding(sparse=True)``."""
    named = {id(parameter): name for name, parameter in module.named_parameters()}
    sparse = [each for each in module.modules() if getattr(each, "sparse", False) is True]
    weights = [w for w in (getattr(each, "weight", None) for each in sparse) if isinstance(w, Tensor)]
    return [named[id(w)] for w in weights if id(w) in named and w.dim() == 2 and w.is_contiguous() and w.numel()]


def newly_trainable(module: Module, layout: Layout) -> dict[str, Tensor]:
    """Trainable parameters that are not exchanged, since they were frozen or missing when the layout was made."""
    known = {spec.name for spec in layout.tensors}
    return {n: p for n, p in trainable_parameters(module).items() if n not in known}


def _check_constants(tensors: Mapping[str, Tensor], theirs: bytes, worker: int) -> bytes:
    """Raise if a replacement has other values than the others began with."""
    if digest_of(tensors) != theirs:
        raise LayoutMismatchError(
            f"Worker {worker} was replaced, but tensors of its new process that are not exchanged "
            f"({', '.join(tensors)}) differ from those that the others began with. Expected the same values from every "
            "start of the script: call seed_everything() first, or load them from a file."
        )
    return theirs


def _check_same(collectives: Collectives, layout: Layout, worker: int) -> None:
    """Raise on every worker if the module of any differs from the chief's."""
    problem: str | None = None
    try:
        theirs = collectives.broadcast_of_chief(layout.describe(), "layout")
        layout.check_same(theirs, f"worker {worker}", f"worker {collectives.chief}")
    except LayoutMismatchError as error:
        problem = str(error)
    text = collectives.reduced("all_reduce", "layout", problem, "given").value
    if text is not None:
        raise LayoutMismatchError(text)
