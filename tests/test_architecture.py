"""What a file may import, and what a process loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import lightning_asgd

ROOT = Path(lightning_asgd.__file__).parent
PACKAGE = "lightning_asgd"


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
    """The modules of this package among them: ``lightning_asgd.core.foundation.layout.Layout`` -> ``layout``."""
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


def test_imports_have_no_cycle() -> None:
    tuple(TopologicalSorter({m: imported_modules(m) for m in FILES}).static_order())


def test_server_and_worker_do_not_know_each_other() -> None:
    for side, other in (("core.server", "core.worker"), ("core.worker", "core.server")):
        for module in FILES:
            if is_part_of(module, side):
                assert not [m for m in imported_modules(module) if is_part_of(m, other)], module


def test_only_the_package_itself_and_engines_import_the_strategy() -> None:
    assert [m for m in FILES if "core.lightning.strategy" in imported_modules(m)] == ["__init__", "ray.torch_trainer"]


def test_only_one_module_imports_lightning() -> None:
    for module in set(FILES) - {"core.lightning.class_trees"}:
        assert not [n for n in imported_names(module) for p in LIGHTNING if is_part_of(n, p)], module
        assert not [s for s in strings_outside_docstrings(module) for p in LIGHTNING if is_part_of(s, p)], module


def test_only_one_module_imports_rpc() -> None:
    for module in set(FILES) - {"transports.rpc.tensorpipe"}:
        assert not [n for n in imported_names(module) if is_part_of(n, RPC)], module
        assert RPC not in strings_outside_docstrings(module), module
        attributes = [n for n in ast.walk(TREES[module]) if isinstance(n, ast.Attribute) and n.attr == "rpc"]
        assert not [ast.unparse(n) for n in attributes if ast.unparse(n.value).endswith("dist")], module


def test_only_one_package_imports_zmq() -> None:
    found = {module for module in FILES if any(is_part_of(name, "zmq") for name in imported_names(module))}
    assert found - {"core.job.registry"} == {
        f"transports.zmq.{end}" for end in ("kind", "server", "sockets", "transport")
    }
    assert "zmq" not in loaded_after("import lightning_asgd.core.server.process"), (
        "who does not use it needs not have it"
    )


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_server_process_never_loads_lightning() -> None:
    loaded = loaded_after("import lightning_asgd.core.server.process")
    assert "torch" in loaded
    assert not {m for m in loaded if m != PACKAGE and m.startswith(("lightning", "pytorch_lightning", "torchmetrics"))}


def test_the_command_line_loads_torch_only_where_it_is_needed() -> None:
    assert not loaded_after("import lightning_asgd.cli.command_line, lightning_asgd.sizing") & {"torch", *LIGHTNING}


def test_public_names_need_no_extra() -> None:
    extras = "cloudpickle", "jsonargparse", "matplotlib", "pandas", "pyarrow", "ray", "torchvision", "wandb", "zmq"
    loaded_after(
        f"import sys\nsys.modules.update(dict.fromkeys({extras}))\n"  # importing one fails
        f"import lightning_asgd\nfor name in lightning_asgd.__all__: getattr(lightning_asgd, name)"
    )


def test_the_reaper_never_loads_torch() -> None:
    loaded = loaded_after("import lightning_asgd.core.job.reaper")
    assert "psutil" in loaded
    assert not loaded & {"torch", "numpy", *LIGHTNING}
