"""Who may import whom. The table is what docs/architecture.md shows; it is also the tightest one that holds."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_asgd

ROOT = Path(lightning_asgd.__file__).parent
PACKAGE = "lightning_asgd"

# Module -> the modules of this package that it may import, in layers from the bottom to the top. A module may import
# only modules above it in this table, which leaves no room for a cycle. Packages' own (empty) __init__ are left out of
# the right-hand sides: importing a module of a package runs them anyway.
ALLOWED: dict[str, set[str]] = {
    # words
    "errors": set(),
    "messages.figures": set(),
    "messages.session": {"messages.figures"},
    "messages.weights": set(),
    "messages.epochs": set(),
    "messages.collectives": {"messages.figures"},
    "messages.restoration": {"messages.epochs"},
    "messages": {
        "messages.collectives",
        "messages.epochs",
        "messages.figures",
        "messages.restoration",
        "messages.session",
        "messages.weights",
    },
    "stats": {"messages"},
    "figures": {"messages"},
    "journal": {"errors", "messages"},
    "layout": {"errors", "messages"},
    "finite": set(),
    "ranges": set(),
    # sampling, on the worker
    "optim": {"errors"},
    "posterior": {"errors"},
    # rules
    "algorithms.base": {"errors"},
    "algorithms.settings": {"errors"},
    "algorithms.worker": {"algorithms.base", "errors"},
    "algorithms.asgd": {"algorithms.base", "errors"},
    "algorithms.dana": {"algorithms.asgd", "algorithms.base", "algorithms.worker", "errors"},
    "algorithms.downpour": {"algorithms.asgd", "algorithms.base", "algorithms.settings", "errors"},
    "algorithms.elastic": {"algorithms.base", "algorithms.settings", "algorithms.worker", "errors"},
    "algorithms.hogwild": {"algorithms.base", "errors"},
    "algorithms.layerwise": {"algorithms.base", "algorithms.settings", "errors"},
    "algorithms.rounds": {"algorithms.base", "algorithms.settings"},
    "algorithms.averaging": {"algorithms.asgd", "algorithms.base", "algorithms.rounds", "algorithms.settings"},
    "algorithms.diloco": {"algorithms.asgd", "algorithms.base", "algorithms.rounds", "algorithms.settings"},
    "algorithms.sgmcmc": {
        "algorithms.base",
        "algorithms.elastic",
        "algorithms.settings",
        "errors",
        "optim",
    },
    "algorithms.staleness": {"algorithms.base", "algorithms.settings"},
    "algorithms": {
        "algorithms.asgd",
        "algorithms.averaging",
        "algorithms.base",
        "algorithms.dana",
        "algorithms.diloco",
        "algorithms.downpour",
        "algorithms.elastic",
        "algorithms.hogwild",
        "algorithms.layerwise",
        "algorithms.rounds",
        "algorithms.sgmcmc",
        "algorithms.staleness",
        "errors",
    },
    "compression": {"algorithms.base", "algorithms.settings", "errors"},
    "streams": {"compression", "finite", "messages"},
    "config": {"algorithms", "compression", "errors"},
    # pipes
    "rendezvous": {"errors"},
    "transport": set(),
    "transport.base": set(),
    "transport.inprocess": {"transport.base"},
    "transport.once": set(),
    "transport.rpc": {"errors", "transport.base", "transport.once"},
    "transport.wire": {"algorithms", "algorithms.base", "compression", "errors", "layout", "messages"},
    "transport.zeromq": set(),
    "transport.zeromq.ends": {"errors", "transport.wire"},
    "transport.zeromq.server": {"errors", "messages", "transport.once", "transport.wire", "transport.zeromq.ends"},
    "transport.zeromq.worker": {"config", "messages", "transport.base", "transport.once", "transport.wire"}
    | {"transport.zeromq.ends"},
    "transport.choose": {"config", "errors", "rendezvous", "transport.base", "transport.rpc"}
    | {"transport.zeromq.server", "transport.zeromq.worker"},
    "transport.shared_memory": {"layout", "messages"},
    # server
    "server": set(),
    "server.coordinator": {"errors", "messages"},
    "server.gradients": {"messages"},
    "server.leases": {"errors", "messages", "ranges"},
    "server.epochs": {"errors", "messages", "server.leases"},
    "server.restoration": {"messages"},
    "server.snapshots": {"errors", "messages", "transport.wire"},
    "server.shard": {"algorithms.base", "errors", "finite", "messages"},
    "server.buffers": {"layout", "messages", "streams", "transport.shared_memory"},
    "server.view": {"messages", "server.coordinator", "server.leases", "server.shard"},
    "server.service": {
        "errors",
        "messages",
        "server.buffers",
        "server.coordinator",
        "server.epochs",
        "server.gradients",
        "server.leases",
        "server.restoration",
        "server.shard",
        "server.snapshots",
        "server.view",
    },
    "server.process": {"rendezvous", "server.service", "server.snapshots", "transport.base", "transport.choose"},
    # worker
    "worker": set(),
    "worker.client": {"algorithms", "compression", "errors", "layout", "messages", "streams", "transport.base"},
    "worker.collectives": {"worker.client"},
    "worker.attachment": {"messages", "worker.client"},
    "worker.lane": {"transport.shared_memory"},
    "worker.replica": {"algorithms.base", "errors", "finite", "layout", "messages", "transport.shared_memory"}
    | {"worker.lane"},
    "worker.sharing": {"layout", "messages", "stats"},
    "worker.data": set(),
    "worker.pace": set(),
    "worker.exchange": {
        "algorithms.base",
        "config",
        "errors",
        "messages",
        "stats",
        "streams",
        "worker.client",
        "worker.data",
        "worker.pace",
        "worker.replica",
        "worker.sharing",
    },
    "worker.fragments": {"layout", "messages", "stats", "worker.exchange", "worker.sharing"},
    "worker.hogwild": {
        "algorithms.base",
        "algorithms.hogwild",
        "errors",
        "layout",
        "transport.shared_memory",
        "worker.collectives",
        "worker.sharing",
    },
    "worker.heartbeat": {"errors", "stats", "worker.client"},
    "worker.meeting": {"messages", "worker.client", "worker.collectives", "worker.sharing"},
    "worker.meter": {"messages", "stats"},
    "worker.recovery": {"errors", "messages", "worker.client", "worker.sharing"},
    "worker.leases": {"errors", "messages", "worker.client", "worker.data"},
    "worker.layerwise": {"layout", "worker.client", "worker.sharing"},
    "worker.entry": {
        "algorithms",
        "algorithms.base",
        "config",
        "errors",
        "finite",
        "layout",
        "stats",
        "streams",
        "transport.shared_memory",
        "worker.client",
        "worker.collectives",
        "worker.data",
        "worker.exchange",
        "worker.fragments",
        "worker.hogwild",
        "worker.layerwise",
        "worker.replica",
        "worker.sharing",
    },
    # sizing
    "sizing": {"errors"},
    # virtual time
    "simulation.checks": {"errors"},
    "simulation.clock": set(),
    "simulation.speeds": {"errors", "simulation.checks"},
    "simulation.problems": {"errors", "simulation.checks"},
    "simulation.network": {"errors", "messages", "simulation.checks", "simulation.clock", "transport.base"},
    "simulation.report": set(),
    "simulation.worker": {
        "config",
        "errors",
        "finite",
        "layout",
        "messages",
        "simulation.clock",
        "simulation.problems",
        "simulation.speeds",
        "stats",
        "worker.client",
        "worker.exchange",
        "worker.replica",
    },
    "simulation.run": {
        "algorithms.base",
        "config",
        "errors",
        "layout",
        "messages",
        "server.service",
        "simulation.checks",
        "simulation.clock",
        "simulation.network",
        "simulation.problems",
        "simulation.report",
        "simulation.speeds",
        "simulation.worker",
        "worker.client",
    },
    "simulation": {
        "simulation.network",
        "simulation.problems",
        "simulation.report",
        "simulation.run",
        "simulation.speeds",
    },
    "simulation.forecast": {
        "simulation.network",
        "simulation.problems",
        "simulation.report",
        "simulation.run",
        "simulation.speeds",
        "sizing",
    },
    # processes
    "rank_variables": set(),
    "exit_code": set(),
    "reaper": set(),
    "supervisor": {"errors", "exit_code", "reaper", "rendezvous", "server.process"},
    # Lightning
    "resume": set(),
    "_lightning": {"errors"},
    "callbacks": {"_lightning"},
    "monitor": {"_lightning", "errors", "figures", "journal", "worker.meter"},
    "timing": {"_lightning", "errors"},
    # data
    "data_stalls": set(),
    "data_stalls.cache": {"errors"},
    "data_stalls.stalls": set(),
    "data_stalls.monitor": {"_lightning"},
    "data_stalls.probe": {"data_stalls.cache", "data_stalls.stalls", "errors", "stats", "timing"},
    "_places": {"messages"},
    "_batches": {"worker.leases"},
    "_loop": {"_batches", "_places", "messages", "worker.leases"},
    "launcher": {
        "_lightning",
        "errors",
        "messages",
        "rank_variables",
        "rendezvous",
        "server.process",
        "stats",
        "supervisor",
    }
    | {"transport.base", "transport.choose"},
    # Lightning's hooks
    "process_group": {"errors", "worker.collectives"},
    "world": {"errors", "process_group", "rank_variables"},
    "membership": {
        "algorithms.base",
        "config",
        "errors",
        "launcher",
        "layout",
        "messages",
        "resume",
        "stats",
        "supervisor",
        "worker.client",
        "worker.collectives",
        "worker.heartbeat",
        "worker.recovery",
        "worker.sharing",
    },
    "runs": {
        "_lightning",
        "algorithms",
        "algorithms.base",
        "callbacks",
        "config",
        "errors",
        "launcher",
        "layout",
        "membership",
        "messages",
        "resume",
        "stats",
        "worker.attachment",
        "worker.client",
        "worker.heartbeat",
    },
    "_undealt": {"_lightning", "worker.collectives"},
    "training_data": {
        "_lightning",
        "_undealt",
        "_batches",
        "worker.collectives",
        "_loop",
        "_places",
        "algorithms.base",
        "config",
        "membership",
        "messages",
        "ranges",
        "resume",
    }
    | {"worker.data", "worker.sharing"},
    "fit": {
        "_lightning",
        "_places",
        "callbacks",
        "config",
        "finite",
        "membership",
        "messages",
        "resume",
        "supervisor",
        "training_data",
        "worker.collectives",
        "worker.entry",
        "worker.meeting",
        "worker.meter",
        "worker.sharing",
    },
    "strategy": {
        "_lightning",
        "algorithms",
        "algorithms.base",
        "callbacks",
        "compression",
        "config",
        "errors",
        "fit",
        "launcher",
        "membership",
        "messages",
        "monitor",
        "optim",
        "process_group",
        "world",
        "resume",
        "runs",
        "stats",
        "supervisor",
        "transport.choose",
        "worker.collectives",
        "worker.entry",
        "worker.meter",
        "worker.sharing",
    },
    # the command line
    "report": set(),
    "report.curves": {"journal", "messages"},
    "report.pictures": {"figures", "journal", "report.curves"},
    "report.page": {"figures", "journal", "messages", "report.pictures"},
    "commands": set(),
    "commands.user_code": {"errors"},
    "commands.tables": {"errors"},
    "commands.plan": {"commands.tables", "commands.user_code", "errors", "simulation.forecast", "sizing", "timing"},
    "commands.report": {"errors", "journal", "report.page"},
    "commands.serve": {"config", "rendezvous", "server.process", "server.snapshots", "supervisor", "transport.choose"},
    "commands.stalls": {"commands.tables", "commands.user_code", "data_stalls.probe", "data_stalls.stalls"},
    "commands.status": {"commands.tables", "config", "errors", "figures", "messages", "rendezvous"}
    | {"transport.base", "transport.choose"},
    "commands.main": {"commands.plan", "commands.report", "commands.serve", "commands.stalls", "commands.status"}
    | {"errors"},
    # what users import
    "__init__": {
        "_lightning",
        "config",
        "errors",
        "monitor",
        "posterior",
        "rank_variables",
        "stats",
        "strategy",
        "world",
    }
    | {"data_stalls.cache", "data_stalls.monitor"},
}

LIGHTNING = ("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "torchmetrics")
RPC = "torch.distributed.rpc"


def module_files() -> dict[str, Path]:
    files = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        files[".".join(parts)] = path
    return files


FILES = module_files()
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported_names(module: str) -> Iterator[str]:
    """Dotted name of everything that a module imports, at its top, in functions and for type checking."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: imports are absolute in this package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(module: str) -> set[str]:
    """The modules of this package among them: ``lightning_asgd.layout.Layout`` -> ``layout``."""
    found = set()
    for name in imported_names(module):
        if name.split(".")[0] != PACKAGE:
            continue
        inner = name.removeprefix(PACKAGE).removeprefix(".")
        while inner and inner not in FILES:
            inner = inner.rpartition(".")[0]
        found.add(inner or "__init__")
    return found


def strings_outside_docstrings(module: str) -> Iterator[str]:
    texts = {id(n.value) for n in ast.walk(TREES[module]) if isinstance(n, ast.Expr)}
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def is_part_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_table_lists_every_module() -> None:
    assert set(ALLOWED) == set(FILES)


def test_table_is_in_layers() -> None:
    order = list(ALLOWED)
    for position, (module, allowed) in enumerate(ALLOWED.items()):
        assert allowed <= set(order[:position]), f"{module} may import a module below it"


@pytest.mark.parametrize("module", sorted(FILES))
def test_module_imports_what_the_table_says_and_no_less(module: str) -> None:
    assert imported_modules(module) == ALLOWED.get(module, set())


def test_imports_have_no_cycle() -> None:
    tuple(TopologicalSorter({m: imported_modules(m) for m in FILES}).static_order())


def test_server_and_worker_do_not_know_each_other() -> None:
    for module in FILES:
        side, other = ("server", "worker") if is_part_of(module, "server") else ("worker", "server")
        if is_part_of(module, side):
            assert not [m for m in imported_modules(module) if is_part_of(m, other)], module


def test_only_the_package_itself_imports_the_strategy() -> None:
    assert [m for m in FILES if "strategy" in imported_modules(m)] == ["__init__"]


def test_only_one_module_imports_lightning() -> None:
    for module in set(FILES) - {"_lightning"}:
        assert not [n for n in imported_names(module) for p in LIGHTNING if is_part_of(n, p)], module
        assert not [s for s in strings_outside_docstrings(module) for p in LIGHTNING if is_part_of(s, p)], module


def test_only_one_module_imports_rpc() -> None:
    for module in set(FILES) - {"transport.rpc"}:
        assert not [n for n in imported_names(module) if is_part_of(n, RPC)], module
        assert RPC not in strings_outside_docstrings(module), module
        attributes = [n for n in ast.walk(TREES[module]) if isinstance(n, ast.Attribute) and n.attr == "rpc"]
        assert not [ast.unparse(n) for n in attributes if ast.unparse(n.value).endswith("dist")], module


def test_only_one_package_imports_zmq() -> None:
    found = {module for module in FILES if any(is_part_of(name, "zmq") for name in imported_names(module))}
    assert found - {"transport.choose"} == {f"transport.zeromq.{end}" for end in ("ends", "server", "worker")}
    assert "zmq" not in loaded_after("import lightning_asgd.server.process"), "who does not use it needs not have it"


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_server_process_never_loads_lightning() -> None:
    loaded = loaded_after("import lightning_asgd.server.process")
    assert "torch" in loaded
    assert not {m for m in loaded if m != PACKAGE and m.startswith(("lightning", "pytorch_lightning", "torchmetrics"))}


def test_the_command_line_loads_torch_only_where_it_is_needed() -> None:
    assert not loaded_after("import lightning_asgd.commands.main, lightning_asgd.sizing") & {"torch", *LIGHTNING}


def test_the_reaper_never_loads_torch() -> None:
    loaded = loaded_after("import lightning_asgd.reaper")
    assert "psutil" in loaded
    assert not loaded & {"torch", "numpy", *LIGHTNING}
