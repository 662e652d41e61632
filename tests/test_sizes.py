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
    "cli.plan_command.plan",
    "cli.serve_command.serve",
    "ray.trainer.ASGDTrainer.__init__",
    "data_stalls.probe.stalls",
    "data_stalls.shared_loader.SharedLoader.__init__",
    "optim.PSGLD.__init__",
    "optim.SGHMC.__init__",
    "optim.SGLD.__init__",
    "adapter.fabric_strategy.FabricASGDStrategy.__init__",
    "adapter.strategy.ASGDStrategy.__init__",
    "loop.async_sgd.AsyncSGD.__init__",
    "worker.served_embedding.ServedEmbedding.__init__",
}

LARGE_CLASSES: dict[str, dict[str, int]] = {
    "lines": {
        "adapter.fit_session.FitSession": 374,
        "adapter.leased_loop.LeasedLoop": 371,
        "adapter.strategy.ASGDStrategy": 360,
        "loop.fixed_fleet.FixedFleet": 385,
        "loop.loop_session.LoopSession": 405,
        "loop.participation.Participation": 331,
        "loop.training_job.TrainingJob": 356,
        "processes.server_hosts.ServerHosts": 303,
        "processes.supervisor.Supervisor": 331,
        "ray.trainer.ASGDRun": 305,
        "server.collective_table.CollectiveTable": 313,
        "server.lease_table.Leases": 411,
        "server.membership.Membership": 409,
        "server.service.Service": 378,
        "server.shard.Shard": 368,
        "worker.lease_client.DataLeases": 408,
        "worker.replica.Replica": 368,
    },
    "methods": {
        "adapter.fit_session.FitSession": 37,
        "adapter.island_strategy.IslandStrategy": 26,
        "adapter.leased_loop.LeasedLoop": 31,
        "adapter.process_group.WorkersGroup": 31,
        "adapter.strategy.ASGDStrategy": 28,
        "algorithms.base.Algorithm": 27,
        "data_stalls.batch_board.BatchBoard": 21,
        "islands.island_fleet.IslandFleet": 26,
        "islands.island_group.IslandGroup": 28,
        "islands.island_synchronizer.IslandSynchronizer": 22,
        "islands.part_exchange.PartExchange": 21,
        "loop.elastic_run.ElasticFleet": 31,
        "loop.fixed_fleet.FixedFleet": 38,
        "loop.fleet.Fleet": 24,
        "loop.loop_session.LoopSession": 41,
        "loop.participation.Participation": 35,
        "loop.training_job.TrainingJob": 24,
        "processes.server_hosts.ServerHosts": 29,
        "processes.supervisor.Supervisor": 37,
        "ray.trainer.ASGDRun": 21,
        "server.collective_table.CollectiveTable": 30,
        "server.lease_table.Leases": 40,
        "server.membership.Membership": 41,
        "server.service.Service": 35,
        "server.shard.Shard": 26,
        "server.stream_leases.StreamLeases": 21,
        "transports.rendezvous.Rendezvous": 24,
        "worker.collectives.Collectives": 23,
        "worker.connection.Connection": 21,
        "worker.lease_client.DataLeases": 42,
        "worker.replica.Replica": 34,
        "worker.row_replica.RowReplica": 24,
        "worker.synchronizer.Synchronizer": 21,
    },
    "attributes": {
        "adapter.asgd_monitor.ASGDMonitor": 14,
        "adapter.fit_session.FitSession": 17,
        "adapter.leased_loop.LeasedLoop": 34,
        "cli.run_hosting.RunHosting": 13,
        "islands.island_group.IslandGroup": 14,
        "islands.part_exchange.PartExchange": 13,
        "loop.hosted_run.HostedRun": 14,
        "loop.loop_session.LoopSession": 21,
        "loop.participation.Participation": 14,
        "monitoring.meter.Meter": 18,
        "processes.run_finder.RunFinder": 15,
        "processes.server_hosts.ServerHosts": 26,
        "processes.supervisor.Supervisor": 29,
        "ray.trainer.ASGDRun": 20,
        "server.lease_table.Leases": 18,
        "simulation.run.Running": 13,
        "simulation.simulated_worker.SimulatedWorker": 16,
        "transports.gateway._Relay": 13,
        "transports.zmq_server.ZmqServer": 13,
        "worker.connection.Connection": 18,
        "worker.exchange_period.Schedule": 14,
        "worker.exchange_recovery.ExchangeLog": 14,
        "worker.exchanger.Channel": 17,
        "worker.layer_gradients.LayerGradients": 21,
        "worker.replica.Replica": 20,
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
