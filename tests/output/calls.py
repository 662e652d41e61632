"""Every call of the package that prints or logs, and the texts that it may print, read from the code.

What is filled in is an ellipsis: ``Worker … ended with exit code …``.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.test_architecture import TREES

__all__ = ["FILLED", "Call", "calls", "letters", "sentences", "strays"]

FILLED = "…"
FEW = 6  # letters without which a text would fit every line
_DEEP = 6  # names that are followed, one after the other
_CLAUSE = 19  # letters of a part of a text of which each variant is a text of its own
_LEVELS = {"debug": "hidden", "info": "hidden", "warning": "warning", "error": "error", "exception": "error"}
_LEVELS |= {"log": "hidden or warning"}  # by a variable
_PYTHON_WARNS = ("warn", "rank_zero_warn", "_warn_once", "warnings.warn")
_TERMINALS = ("output.print", "screen.print", "live.update", "print")
_EVENTS = ("self.publish", "members.publish", "session.members.publish", "self.members.publish", "self._complain")
_EVENTS += ("self.end", "self.members.end", "self.refuse", "members.refuse", "service.abort")  # of servers
_LOGS = rf"(.*\W)?\w*log(ger)?\.({'|'.join(_LEVELS)})"
_PRINTERS = re.compile(rf"sys\.(__)?std(out|err)(__)?|{_LOGS}|print|traceback\.print_\w+|warnings\.warn")
_HARMLESS = ("sys.stdout.flush", "sys.stderr.flush")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Call:
    """A call that prints.

    Attributes:
        function: where it stands: ``loop.fleet.Fleet._tell_order``.
        level: of the log record, or the stream.
        texts: that it may print; none if all of the text comes from elsewhere.
    """

    function: str
    level: str
    texts: tuple[str, ...] = ()


def letters(text: str) -> int:
    """How many letters of a text are known."""
    return len(re.findall(r"[^\W\d_]", text))


@functools.cache
def calls() -> list[Call]:
    """The calls that print."""
    return [
        Call(name, level, _printed(node, _Scope(module, functions)))
        for module, tree in TREES.items()
        for node, name, functions in _nodes(tree, module, ())
        if isinstance(node, ast.Call) and (level := _level(node, module))
    ]


def strays() -> list[str]:
    """Where something that prints is used in another way than by one of these calls."""
    found = []
    for module, tree in TREES.items():
        known = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and (_level(node, module) or ast.unparse(node.func) in _HARMLESS)
            for part in ast.walk(node)
        }
        for node, name, _ in _nodes(tree, module, ()):
            if isinstance(node, ast.Name | ast.Attribute) and id(node) not in known:
                found += [f"{name}: {ast.unparse(node)}"] if _PRINTERS.fullmatch(ast.unparse(node)) else []
    return found


def sentences(place: str) -> tuple[str, ...]:
    """All texts of a function or class, but for its docstrings: those of a call whose text is built there."""
    module = next(each for each in sorted(TREES, reverse=True) if place.startswith(f"{each}."))
    found: list[str] = []
    raised = {id(part) for node in ast.walk(TREES[module]) if isinstance(node, ast.Raise) for part in ast.walk(node)}
    for node, name, functions in _nodes(TREES[module], module, ()):
        inside = f"{name}.".startswith(f"{place}.") and id(node) not in raised
        if inside and isinstance(node, ast.Return | ast.Assign | ast.Call | ast.Yield):
            for each in ast.iter_child_nodes(node):
                for value in each.elts if isinstance(each, ast.List | ast.Tuple) else [each]:
                    if isinstance(value, ast.JoinedStr | ast.IfExp):
                        found += _Scope(module, functions).texts(value)
    return _known([text for text in found if re.search(r"[.:]($|\s)", text)])


def _level(call: ast.Call, module: str) -> str:
    """The level or stream of a call that prints; empty if it prints nothing."""
    name = ast.unparse(call.func)
    owner, _, last = name.rpartition(".")
    if isinstance(call.func, ast.IfExp):  # (say if encrypted else log.warning)(line)
        each = [_level(ast.Call(part, [], []), module) for part in (call.func.body, call.func.orelse)]
        return " or ".join(filter(None, each))
    if owner == "log" and last in _LEVELS:
        traced = last == "exception" or any(word.arg == "exc_info" for word in call.keywords)
        return f"{_LEVELS[last]}, traceback" if traced else _LEVELS[last]
    if last == "say" or name.startswith("logging.getLogger("):
        return "info"
    if name in _PYTHON_WARNS:
        return next((ast.unparse(each) for each in call.args if ast.unparse(each).endswith("Warning")), "UserWarning")
    if module.startswith(("core.server.", "elastic.", "recovery.")) and name in _EVENTS:
        return "warning"
    if last == "write" and "sys.std" in owner:
        return " or ".join(re.findall(r"sys\.(std\w+)", owner))
    if name == "os.write" and "stderr" in ast.unparse(call.args[0]):
        return "stderr"
    return "stdout" if name in _TERMINALS else ""


def _nodes(
    node: ast.AST, name: str, functions: tuple[Function, ...]
) -> Iterator[tuple[ast.AST, str, tuple[Function, ...]]]:
    """The nodes below one: with the name of what they stand in, and the functions around them."""
    for child in ast.iter_child_nodes(node):
        inner = (*functions, child) if isinstance(child, Function) else functions
        where = f"{name}.{child.name}" if isinstance(child, Function | ast.ClassDef) else name
        yield child, where, inner
        yield from _nodes(child, where, inner)


def _printed(call: ast.Call, scope: _Scope) -> tuple[str, ...]:
    """The texts of a call that prints; those of a log record with its arguments."""
    name = ast.unparse(call.func)
    skipped = name in ("log.log", "os.write") or name.endswith(".refuse")
    text, *arguments = call.args[skipped:] or [ast.Constant("")]
    found: list[str] = []
    for each in scope.texts(text):
        fields = re.split(r"%[\w.]*[a-z]", each) if name.startswith("log.") else [each]
        given = [scope.clauses(argument) for argument in arguments] + [[FILLED]] * len(fields)
        for values in itertools.product(*given[: len(fields) - 1]):
            found.append("".join(map("".join, itertools.zip_longest(fields, values, fillvalue=""))))
    return _known(found)


def _known(texts: list[str]) -> tuple[str, ...]:
    short = (re.sub(rf"{FILLED}( ?{FILLED})+", FILLED, text).strip("\n") for text in texts)
    return tuple(dict.fromkeys(text for text in short if letters(text) >= FEW))


# ---------------------------------------------------------------------- what an expression stands for

_FUNCTIONS = {
    (module, node.name): node for module, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, Function)
}
_IMPORTS = {
    (module, name.name): (node.module or "").removeprefix("lightning_asgd").removeprefix(".")
    for module, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
_CLASSES = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@dataclass(frozen=True)
class _Scope:
    """Where names are looked up: a module, and the functions around an expression."""

    module: str
    functions: tuple[Function, ...] = ()
    deep: int = _DEEP
    in_clause: bool = False

    def clauses(self, node: ast.expr) -> list[str]:
        """The variants of a part of a text, if they are clauses: a row for each plural would be too many."""
        variants = replace(self, in_clause=True).texts(node)
        varies = not self.in_clause and min(map(letters, variants)) >= _CLAUSE
        return variants if len(variants) == 1 or varies else [FILLED]

    def texts(self, node: ast.expr) -> list[str]:
        """The texts that an expression may stand for."""
        match node:
            case ast.Constant(str() as text):
                return [text]
            case ast.JoinedStr(parts):
                return _products([self.texts(part) for part in parts])
            case ast.BinOp(left, ast.Add(), right):
                return _products([self.texts(left), self.texts(right)])
            case ast.FormattedValue(value):
                return self.clauses(value)
            case ast.Call(ast.Name("str"), [value]) | ast.Call(ast.Attribute(value, "encode" | "rstrip")):
                return self.texts(value)
            case ast.Call(ast.Name("count"), [_, ast.Constant(str() as what)]):
                return [f"{FILLED} {what}{FILLED}"]
        found = replace(self, deep=self.deep - 1)._meant(node) if self.deep else []
        texts = [text for value, scope in found for text in scope.texts(value)]
        if isinstance(node, ast.Name):  # which may be empty before it gets its value
            texts = [text for text in texts if text]
        return texts or [FILLED]

    def _meant(self, node: ast.expr) -> list[tuple[ast.expr, _Scope]]:
        """The expressions that another one may stand for, and where they stand."""
        match node:
            case ast.IfExp(_, body, other):
                return [(body, self), (other, self)]
            case ast.Name(name):
                return self._values(name)
            case ast.Attribute(ast.Name("self"), name):
                values = [value for each in _CLASSES for value in _assigned(each, name)]
                return [(value, self) for value in values if isinstance(value, ast.Constant) and value.value]
            case ast.Call(ast.Name(name)):
                return self._returned(name)
            case ast.Call(ast.Attribute(ast.Name(owner), name)) if (there := self._imported(owner)) is not None:
                return there._returned(name)
            case ast.Subscript(whole, ast.Constant(int() as index)):  # of what is unpacked
                found = self._meant(whole)
                return [(value.elts[index], scope) for value, scope in found if isinstance(value, ast.Tuple)]
        return []

    def _values(self, name: str) -> list[tuple[ast.expr, _Scope]]:
        for depth in range(len(self.functions), -1, -1):
            node = self.functions[depth - 1] if depth else TREES[self.module]
            if found := _assigned(node, name):
                return [(value, replace(self, functions=self.functions[:depth])) for value in found]
        there = self._imported(name)
        return [] if there is None else there._values(name)

    def _returned(self, name: str) -> list[tuple[ast.expr, _Scope]]:
        node, there = _FUNCTIONS.get((self.module, name)), self._imported(name)
        if node is None:
            return [] if there is None else there._returned(name)
        ends = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        return [(value, replace(self, functions=(node,))) for value in ends if value is not None]

    def _imported(self, name: str) -> _Scope | None:
        """The module that a name is imported from, or that it is the name of."""
        module = _IMPORTS.get((self.module, name), "")
        found = next((each for each in (f"{module}.{name}", module) if each in TREES), None)
        return None if found is None else replace(self, module=found, functions=())


def _products(parts: list[list[str]]) -> list[str]:
    return ["".join(variant) for variant in itertools.product(*parts)]


def _assigned(node: ast.AST, name: str) -> list[ast.expr]:
    """What a name is given within a module, class or function, but not in functions within it."""
    found: list[ast.expr] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign | ast.NamedExpr) and child.value is not None:
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                found += [value for each, value in _pairs(target, child.value) if each == name]
        if not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            found += _assigned(child, name)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple):
        for index, each in enumerate(target.elts):
            part = value.elts[index] if isinstance(value, ast.Tuple) else ast.Subscript(value, ast.Constant(index))
            yield from _pairs(each, part)
    elif isinstance(target, ast.Name):
        yield target.id, value
