"""For processes that the tests start: what Lightning would import on the way, three quarters of what a process costs.

On PYTHONPATH, Python runs this file first. It hides packages that are not ours; most users do not have them either. And
it has torch's compiler imported when it is used: Lightning imports it for an ``isinstance``, torch's optimizers to have
their methods left alone by it. The garbage collector runs less often: while modules are imported it finds nothing.
Servers are forked if possible (forked_servers.py). A server that starts as a new interpreter skips torch's rules for
tensors without data, which take a fifth of its start. The programs of ``tests/examples`` run without this file.
"""

import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import forked_servers

HIDDEN = ("matplotlib", "scipy", "torchvision", "transformers")  # the last looks for the others
COMPILER = "torch._dynamo"


def hiding(find: Callable[[str], Any]) -> Callable[[str], Any]:
    def found(name: str) -> Any:
        if name in HIDDEN:
            raise importlib.metadata.PackageNotFoundError(name)
        return find(name)

    return found


class Compiled(type):
    """The class of compiled modules: there are none before the compiler is imported."""

    def __instancecheck__(cls, module: Any) -> bool:
        compiler = sys.modules[COMPILER]
        return compiler is not LATER and isinstance(module, compiler.OptimizedModule)


class Compiler(types.ModuleType):
    """Gives way to the real module when anything else than this is asked for."""

    __path__ = ()
    OptimizedModule = Compiled("OptimizedModule", (), {})
    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)  # for init_process_group

    @staticmethod
    def disable(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What the compiler is to leave alone is left alone as long as it is not there."""
        return fn if fn is not None else lambda fn: fn

    @staticmethod
    def graph_break(*args: Any, **kwargs: Any) -> None:
        """Nothing, outside of what is being compiled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # the import system's own questions
        return getattr(real_compiler(), name)


def real_compiler() -> Any:
    if sys.modules.get(COMPILER) is LATER:
        del sys.modules[COMPILER]
    return importlib.import_module(COMPILER)


class There(importlib.abc.Loader):
    """Of a module that was imported on the way."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if not name.startswith(f"{COMPILER}.") or sys.modules.get(COMPILER) is not LATER:
            return None
        found = real_compiler()
        if name in sys.modules:
            return importlib.machinery.ModuleSpec(name, There(sys.modules[name]))
        return importlib.machinery.PathFinder.find_spec(name, found.__path__)


LATER = Compiler(COMPILER)
sys.modules[COMPILER] = LATER
if forked_servers.SERVER in sys.orig_argv:
    sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")
gc.set_threshold(50_000)
importlib.metadata.version = hiding(importlib.metadata.version)
importlib.metadata.distribution = hiding(importlib.metadata.distribution)
subprocess.Popen = forked_servers.Popen  # type: ignore[misc]
sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
