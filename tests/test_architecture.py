"""Which file may import which: what the tables of docs/architecture.md say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lightning_asgd

ROOT = Path(lightning_asgd.__file__).parent
PACKAGE = "lightning_asgd"

PAGE = ROOT.parent / "docs" / "architecture.md"


def layers_of(page: str) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
    """What the page says, from the ground up: the files of each layer, and the layers that each may import."""
    files: dict[str, list[str]] = {}
    imports: dict[str, set[str]] = {}
    section = page.partition("## Files, and what each may import")[2].partition("\n## ")[0]
    for heading, text in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", section, re.M | re.S):
        below = re.search(r"Imports: ([\w, ]+)\.", text)
        assert below, f"the section {heading} does not say what its files import"
        names = below[1].split(", ")
        imports[heading] = {"nothing": set(), "everything above": set(files)}.get(below[1], set(names))
        rows = re.findall(r"^\| `([\w/.]+)\.py` \|", text, re.M)
        files[heading] = [row.replace("/", ".").removesuffix(".__init__") for row in rows]
    return files, imports


LAYERS, IMPORTS = layers_of(PAGE.read_text())
LAYER = {file: layer for layer, files in LAYERS.items() for file in files}

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


def is_face(module: str) -> bool:
    """Whether it is a package's ``__init__`` with nothing but a docstring."""
    return FILES[module].name == "__init__.py" and all(isinstance(n, ast.Expr) for n in TREES[module].body)


def test_the_page_lists_every_module_once() -> None:
    listed = [file for files in LAYERS.values() for file in files]
    assert sorted(listed) == sorted(module for module in FILES if not is_face(module) and module != "__init__")


def test_layers_import_layers_below_them_only() -> None:
    order = list(LAYERS)
    for position, layer in enumerate(order):
        assert IMPORTS[layer] <= set(order[:position]), f"{layer} may import a layer above it"


@pytest.mark.parametrize("module", sorted(LAYER))
def test_a_module_imports_what_stands_above_it_and_the_layers_its_own_may_import(module: str) -> None:
    layer = LAYER[module]
    above = set(LAYERS[layer][: LAYERS[layer].index(module)])
    for imported in imported_modules(module):
        if not is_face(imported):
            assert imported in above or LAYER.get(imported) in IMPORTS[layer], f"{module} imports {imported}"


def test_layers_import_what_the_page_says_and_no_less() -> None:
    for layer, files in LAYERS.items():
        needed = {LAYER[other] for file in files for other in imported_modules(file) if not is_face(other)} - {layer}
        assert layer == "tools" or needed == IMPORTS[layer], layer


def test_no_two_modules_have_the_same_name() -> None:
    names = [module.rpartition(".")[2] for module, path in FILES.items() if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_no_two_modules_define_the_same_public_name() -> None:
    found = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in found.items() if count > 1} == set()


def test_imports_have_no_cycle() -> None:
    tuple(TopologicalSorter({m: imported_modules(m) for m in FILES}).static_order())


def test_server_and_worker_do_not_know_each_other() -> None:
    for module in FILES:
        side, other = ("server", "worker") if is_part_of(module, "server") else ("worker", "server")
        if is_part_of(module, side):
            assert not [m for m in imported_modules(module) if is_part_of(m, other)], module


def test_only_the_package_itself_and_engines_import_the_strategy() -> None:
    assert [m for m in FILES if "adapter.strategy" in imported_modules(m)] == ["__init__", "ray.torch_trainer"]


def test_only_one_module_imports_lightning() -> None:
    for module in set(FILES) - {"adapter.class_trees"}:
        assert not [n for n in imported_names(module) for p in LIGHTNING if is_part_of(n, p)], module
        assert not [s for s in strings_outside_docstrings(module) for p in LIGHTNING if is_part_of(s, p)], module


def test_only_one_module_imports_rpc() -> None:
    for module in set(FILES) - {"transports.tensorpipe"}:
        assert not [n for n in imported_names(module) if is_part_of(n, RPC)], module
        assert RPC not in strings_outside_docstrings(module), module
        attributes = [n for n in ast.walk(TREES[module]) if isinstance(n, ast.Attribute) and n.attr == "rpc"]
        assert not [ast.unparse(n) for n in attributes if ast.unparse(n.value).endswith("dist")], module


def test_only_one_package_imports_zmq() -> None:
    found = {module for module in FILES if any(is_part_of(name, "zmq") for name in imported_names(module))}
    assert found - {"transports.registry"} == {f"transports.zmq_{end}" for end in ("server", "sockets", "transport")}
    assert "zmq" not in loaded_after("import lightning_asgd.server.server_process"), (
        "who does not use it needs not have it"
    )


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_a_server_process_never_loads_lightning() -> None:
    loaded = loaded_after("import lightning_asgd.server.server_process")
    assert "torch" in loaded
    assert not {m for m in loaded if m != PACKAGE and m.startswith(("lightning", "pytorch_lightning", "torchmetrics"))}


def test_the_command_line_loads_torch_only_where_it_is_needed() -> None:
    assert not loaded_after("import lightning_asgd.cli.command_line, lightning_asgd.sizing") & {"torch", *LIGHTNING}


def test_the_reaper_never_loads_torch() -> None:
    loaded = loaded_after("import lightning_asgd.processes.reaper")
    assert "psutil" in loaded
    assert not loaded & {"torch", "numpy", *LIGHTNING}
