"""What the structure of the library is measured by: ``python -m tests.house`` prints each figure beside its goal."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.test_architecture import FILES, PACKAGE, ROOT, TREES, imported_modules

CORE = "core"
CLASS_LIMITS = {"lines": 300, "methods": 20, "attributes": 12}
CENTRE = ("exchanger", "shard", "service", "strategy", "fit_session", "leased_loop")
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str, tree: ast.AST) -> int:
    """Lines that are no comment, no docstring and not blank."""
    texts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


CODE = {module: code_lines(path.read_text(), TREES[module]) for module, path in FILES.items()}


def rows_of(page: str) -> dict[str, tuple[set[str], int]]:
    """What the page says of each slice: the slices that it imports, and the most lines of code that it may have."""
    section = page.partition("## Slices")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+)` \|[^|]+\| ([^|]*)\| ([\d,]+) \|$", section, re.M)
    return {name: (set(re.findall(r"[\w/]+", imports)), int(lines.replace(",", ""))) for name, imports, lines in rows}


ROWS = rows_of((ROOT.parent / "docs" / "architecture.md").read_text())
"""The slices imported by each, and the most lines of code that it may have."""


def slice_of(module: str) -> str:
    """The folder that a module belongs to; empty for what is directly in the package, which are public paths."""
    parts = FILES[module].relative_to(ROOT).parent.parts
    return "/".join(parts[: 2 if parts and parts[0] in (CORE, "transports", "tables") else 1])


SLICE = {module: name for module in FILES if (name := slice_of(module)) in ROWS}
"""The slice that each module belongs to."""


def in_core(module: str) -> bool:
    return SLICE.get(module, "").partition("/")[0] == CORE


def features_imported_by_core() -> set[tuple[str, str]]:
    """Each module of the core with each feature's module that it imports."""
    return {
        (module, imported)
        for module in SLICE
        if in_core(module)
        for imported in imported_modules(module)
        if imported in SLICE and not in_core(imported)
    }


def branches(tree: ast.AST) -> int:
    """``if``, conditional expressions, ``while``, and the conditions of comprehensions."""
    nodes = list(ast.walk(tree))
    guards = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return guards + sum(isinstance(node, ast.If | ast.IfExp | ast.While) for node in nodes)


def classes() -> dict[str, dict[str, int]]:
    """Of each class the lines, methods, and attributes that ``__init__`` sets."""
    found = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                names = {
                    target.attr
                    for method in methods
                    if method.name == "__init__"
                    for target in ast.walk(method)
                    if isinstance(target, ast.Attribute)
                    and isinstance(target.ctx, ast.Store)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                }
                lines = (node.end_lineno or 0) - node.lineno + 1
                found[f"{module}.{node.name}"] = {"lines": lines, "methods": len(methods), "attributes": len(names)}
    return found


def crowded_assignments(tree: ast.AST) -> int:
    """Assignments of a tuple to three or more targets."""
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    return sum(isinstance(each, ast.Tuple) and len(each.elts) > 2 for each in targets)


def fields(name: str) -> int:
    """Fields of a message, without those of the classes that it extends."""
    found = [n for tree in TREES.values() for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    return sum(isinstance(each, ast.AnnAssign) for each in found[0].body)


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Annotations of all arguments and results."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            yield from (each.annotation for each in arguments if each is not None and each.annotation is not None)
            if node.returns is not None:
                yield node.returns


def uses_of_any(nodes: Iterable[ast.AST]) -> int:
    return sum(isinstance(each, ast.Name) and each.id == "Any" for node in nodes for each in ast.walk(node))


@cache
def modules_loaded(statement: str) -> int:
    """Modules of this package that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(sum(m.partition('.')[0] == {PACKAGE!r} for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return int(done.stdout)


def lines_below(folder: str) -> tuple[int, int]:
    """Number of Python files below a folder of the repository, and their lines."""
    files = [path for path in (Path(__file__).parent.parent / folder).rglob("*.py") if ".venv" not in path.parts]
    return len(files), sum(len(path.read_text().splitlines()) for path in files)


def measures() -> Iterator[tuple[str, int, int]]:
    """What is measured, the figure of today, and the goal, which it may not exceed."""
    sizes: Counter[str] = Counter()
    for module, slice_ in SLICE.items():
        sizes[slice_] += CODE[module]
    features = {name: size for name, size in sizes.items() if name.partition("/")[0] != CORE}
    largest = max(features, key=lambda name: features[name])
    yield "imports of features by the core", len(features_imported_by_core()), 0
    yield "code lines of the core", sum(sizes.values()) - sum(features.values()), 8_000
    yield f"code lines of the largest feature, {largest}", features[largest], 1_600
    yield "code lines of the library", sum(CODE.values()), 27_000
    yield "files of the library", len(FILES), 190
    yield "modules that ASGDStrategy loads", modules_loaded("from lightning_asgd import ASGDStrategy"), 110
    yield "modules that a server loads", modules_loaded(f"import {PACKAGE}.core.server.process"), 60
    central = [tree for module, tree in TREES.items() if module.rpartition(".")[2] in CENTRE and in_core(module)]
    yield f"branches of {len(central)} central files", sum(map(branches, central)), 170
    for what, goal in CLASS_LIMITS.items():
        figure, name = max((sizes[what], name) for name, sizes in classes().items())
        yield f"{what} of a class, {name}", figure, goal
    yield "assignments with three or more targets", sum(map(crowded_assignments, TREES.values())), 0
    for name, goal in (("Exchange", 12), ("Reply", 10), ("LeaseRequest", 10)):
        yield f"fields of {name}", fields(name), goal
    core = [tree for module, tree in TREES.items() if in_core(module)]
    yield "Any in signatures of the core", uses_of_any(node for tree in core for node in annotations(tree)), 0
    ignored = sum(len(re.findall(r"type: ignore", path.read_text())) for path in FILES.values())
    yield "type: ignore", ignored, 20
    yield "lines of the tests", lines_below("tests")[1], 38_000
    number, lines = lines_below("benchmarks")
    yield "files of the benchmarks", number, 45
    yield "lines of the benchmarks", lines, 10_000


if __name__ == "__main__":
    for what, figure, goal in measures():
        sys.stdout.write(f"{figure:>7,} {goal:>7,}  {what}\n")
