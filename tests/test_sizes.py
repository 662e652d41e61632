"""How large functions, parameter lists and classes may be. The limits only fall.

What is above a limit today is listed with its number. It may shrink, and then its entry is to be lowered; it may not
grow. A new exception needs a good reason, in the message of the commit that makes it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.helpers.ratchet import complaints
from tests.house import CLASS_LIMITS, classes
from tests.test_architecture import TREES

LINES_OF_A_FUNCTION = 60  # with its docstring, without its decorators
LONG_FUNCTIONS: dict[str, int] = {}

PARAMETERS = 7  # without self and cls
MANY_PARAMETERS: dict[str, int] = {}
# Users call these, or give their arguments on the command line: what they take is documented, and stays.
PUBLIC = {
    "plan.command.plan",
    "elastic.serve_command.serve",
    "ray.trainer.ASGDTrainer.__init__",
    "data_stalls.probe.stalls",
    "caches.shared_loader.SharedLoader.__init__",
    "sampling.optim.PSGLD.__init__",
    "sampling.optim.SGHMC.__init__",
    "sampling.optim.SGLD.__init__",
    "loops.fabric.FabricASGDStrategy.__init__",
    "core.lightning.strategy.ASGDStrategy.__init__",
    "loops.async_sgd.AsyncSGD.__init__",
    "tables.served.embedding.ServedEmbedding.__init__",
}

LARGE_CLASSES: dict[str, dict[str, int]] = {
    "lines": {
        "core.job.supervisor.Supervisor": 331,
        "core.job.training_job.TrainingJob": 356,
        "core.leases.client.DataLeases": 408,
        "core.leases.table.Leases": 411,
        "core.lightning.fit_session.FitSession": 366,
        "core.lightning.leased_loop.LeasedLoop": 371,
        "core.lightning.strategy.ASGDStrategy": 360,
        "core.server.collective_table.CollectiveTable": 313,
        "core.server.membership.Membership": 409,
        "core.server.shard.Shard": 368,
        "core.worker.fixed_fleet.FixedFleet": 385,
        "core.worker.participation.Participation": 331,
        "core.worker.replica.Replica": 368,
        "hosting.server_hosts.ServerHosts": 303,
        "loops.session.LoopSession": 405,
        "ray.trainer.ASGDRun": 305,
    },
    "methods": {
        "caches.batch_board.BatchBoard": 21,
        "core.algorithms.base.Algorithm": 27,
        "core.job.rendezvous.Rendezvous": 24,
        "core.job.supervisor.Supervisor": 37,
        "core.job.training_job.TrainingJob": 24,
        "core.leases.client.DataLeases": 42,
        "core.leases.table.Leases": 40,
        "core.lightning.fit_session.FitSession": 37,
        "core.lightning.leased_loop.LeasedLoop": 31,
        "core.lightning.strategy.ASGDStrategy": 28,
        "core.server.collective_table.CollectiveTable": 30,
        "core.server.membership.Membership": 41,
        "core.server.service.Service": 27,
        "core.server.shard.Shard": 26,
        "core.worker.collectives.Collectives": 23,
        "core.worker.connection.Connection": 21,
        "core.worker.fixed_fleet.FixedFleet": 37,
        "core.worker.participation.Participation": 35,
        "core.worker.replica.Replica": 34,
        "core.worker.synchronizer.Synchronizer": 21,
        "elastic.elastic_run.ElasticFleet": 28,
        "hosting.server_hosts.ServerHosts": 29,
        "islands.fleet.IslandFleet": 25,
        "islands.group.IslandGroup": 28,
        "islands.part_exchange.PartExchange": 21,
        "islands.strategy.IslandStrategy": 26,
        "islands.synchronizer.IslandSynchronizer": 22,
        "loops.session.LoopSession": 41,
        "ray.trainer.ASGDRun": 21,
        "streams.server.StreamLeases": 21,
        "tables.rows.worker.RowReplica": 24,
        "world.process_group.WorkersGroup": 31,
    },
    "attributes": {
        "core.job.supervisor.Supervisor": 29,
        "core.leases.table.Leases": 18,
        "core.lightning.fit_session.FitSession": 14,
        "core.lightning.leased_loop.LeasedLoop": 34,
        "core.worker.connection.Connection": 18,
        "core.worker.exchange_period.Schedule": 14,
        "core.worker.exchanger.Channel": 17,
        "core.worker.participation.Participation": 13,
        "core.worker.replica.Replica": 20,
        "elastic.run_hosting.RunHosting": 13,
        "hosting.run_finder.RunFinder": 15,
        "hosting.server_hosts.ServerHosts": 26,
        "islands.group.IslandGroup": 14,
        "islands.hosted_run.HostedRun": 14,
        "islands.part_exchange.PartExchange": 13,
        "layerwise.layer_gradients.LayerGradients": 21,
        "loops.session.LoopSession": 21,
        "monitor.callback.ASGDMonitor": 14,
        "monitor.meter.Meter": 18,
        "one_port.gateway._Relay": 13,
        "ray.trainer.ASGDRun": 20,
        "recovery.exchange_recovery.ExchangeLog": 14,
        "simulation.run.Running": 13,
        "simulation.worker.SimulatedWorker": 16,
        "transports.zmq.server.ZmqServer": 13,
    },
}


def functions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method below a node, by its dotted name."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}"
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner, child
        yield from functions(child, inner)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    starred = [each for each in (given.vararg, given.kwarg) if each is not None]
    return len([each for each in (*named, *starred) if each.arg not in ("self", "cls")])


FUNCTIONS = [pair for module, tree in TREES.items() for pair in functions(tree, module)]


def check(found: dict[str, int], recorded: dict[str, int], limit: int, table: str, what: str, slack: int = 0) -> None:
    above = {name: number for name, number in found.items() if number > limit or name in recorded}
    said = complaints(above, recorded, limit, table, what, slack)
    assert not said, "\n" + "\n".join(said)


def test_functions_are_short() -> None:
    found: dict[str, int] = {}
    for name, function in FUNCTIONS:  # a property's setter has the name of its getter
        found[name] = max(found.get(name, 0), (function.end_lineno or 0) - function.lineno + 1)
    check(found, LONG_FUNCTIONS, LINES_OF_A_FUNCTION, "LONG_FUNCTIONS", "lines")


def test_internal_functions_take_few_parameters() -> None:
    found = {name: parameters(function) for name, function in FUNCTIONS if name not in PUBLIC}
    check(found, MANY_PARAMETERS, PARAMETERS, "MANY_PARAMETERS", "parameters")


def test_public_functions_with_many_parameters_exist() -> None:
    found = {name for name, function in FUNCTIONS if parameters(function) > PARAMETERS}
    assert not PUBLIC - found, f"remove {sorted(PUBLIC - found)} from PUBLIC: no such function takes many parameters"


@pytest.mark.parametrize("what", CLASS_LIMITS)
def test_classes_are_small(what: str) -> None:
    found = {name: sizes[what] for name, sizes in classes().items()}
    check(
        found, LARGE_CLASSES[what], CLASS_LIMITS[what], f'LARGE_CLASSES["{what}"]', what, 20 if what == "lines" else 0
    )
