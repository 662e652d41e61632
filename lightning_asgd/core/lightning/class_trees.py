"""The one place that imports Lightning.

``lightning.pytorch`` and ``pytorch_lightning`` hold the same code as two separate class trees, and both may be loaded
in one process. What this package adds to Lightning is written as classes without a base; :meth:`Tree.derive` puts the
Lightning class of one tree behind them. Neither tree is imported here: a program that makes a Trainer has done so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning import name_check, private_names

MALICIOUS = ("2.6.2", "2.6.3")
"""Releases of Lightning that held malicious code, and were withdrawn. pyproject.toml excludes them too."""

Extension: Any = object
"""Base of the classes that extend one of Lightning's: see :meth:`Tree.derive`."""

# What is imported of Lightning: its public names, by module, and private ones.
_PUBLIC = {
    "Callback": "callbacks",
    "LightningModule": "core",
    "DDPStrategy": "strategies",
    "ModelParallelStrategy": "strategies",
    "MPSAccelerator": "accelerators",
    "Strategy": "strategies",
    "STRATEGY_REGISTRY": "strategies",
    "StrategyRegistry": "strategies",
    "Trainer": "trainer.trainer",
    "TrainerFn": "trainer.states",
}
_PRIVATE = {
    "ScriptLauncher": private_names.script_launcher,
    "MultiProcessLauncher": private_names.multi_process_launcher,
    "callback_states": private_names.callback_states,
    "configure_optimizers": private_names.configure_optimizers,
    "optimizers_to_device": private_names.optimizers_to_device,
    "restart_random_numbers": private_names.restart_random_numbers,
    "set_num_threads": private_names.set_num_threads,
}


class Tree:
    """One of Lightning's two class trees. Its names are attributes, imported when they are first used.

    ``fabric`` is the package below it; ``distribution`` is what pip calls it.
    """

    def __init__(self, package: str, fabric: str, distribution: str) -> None:
        self.package = package
        self.fabric = fabric
        self.distribution = distribution

    @property
    def version(self) -> str:
        """The release, where the tree is loaded."""
        return str(getattr(sys.modules.get(self.package), "__version__", ""))

    def __getattr__(self, name: str) -> Any:
        if name in _PUBLIC:
            return getattr(private_names.import_from(self, _PUBLIC[name]), name)
        if name in _PRIVATE:
            return _PRIVATE[name].imported(self)
        raise AttributeError(f"{name!r} is not one of the Lightning names that this package uses")

    def __repr__(self) -> str:
        return f"Tree({self.package})"

    def __reduce__(self) -> Any:
        return _tree_named, (self.package,)

    @functools.cache  # noqa: B019 - there are two trees, and both live as long as the process
    def derive(self, extension: type, base: str) -> Any:
        """A class that is both ``extension`` and this tree's ``base``; the same one every time.

        The extension's methods come first. Objects can be pickled although the class has no name of its own.
        """
        self._check_names()

        def reduce(self: Any, _: Any = None) -> Any:
            state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
            return _blank, (tree, extension, base), state

        tree = self
        body: dict[str, Any] = {"__module__": extension.__module__, "__doc__": extension.__doc__}
        body |= {"__reduce_ex__": reduce, "tree": tree, "extension": extension}
        return types.new_class(
            extension.__name__, (extension, getattr(self, base)), exec_body=lambda space: space.update(body)
        )

    @functools.cache  # noqa: B019 - as above
    def _check_names(self) -> None:
        name_check.check_tree(self, _warn_once)

    def check_trainer(self, trainer: Any, *, leases: bool) -> None:
        """Refuse a Trainer whose parts lack something that this package uses, or that leases alone use."""
        name_check.check_trainer(self, trainer, _warn_once, leases=leases)

    def check_release(self) -> None:
        """Refuse to train with a release that held malicious code."""
        if self.version in MALICIOUS:
            raise ConfigurationError(
                f"{self.distribution} {self.version} is a malicious release. Expected another version. Uninstall it "
                "and replace the passwords and keys that this machine can read: its code has run."
            )

    def say(self, message: str) -> None:
        """Log something as Lightning's ``rank_zero_info`` does: on rank 0, with the same logger.

        Not by ``rank_zero_info`` itself, whose logger is that of the tree that was imported last.
        """
        from lightning_utilities.core.rank_zero import rank_zero_only

        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            logging.getLogger(f"{self.package}.utilities.rank_zero").info(message)

    def register(self, strategy: Any) -> None:
        """Let this tree's Trainers accept a strategy, and know it as ``"asgd"``, ``"asgd_fork"``, ..."""
        self.DDPStrategy.register(strategy)  # as what an abstract base class calls a virtual subclass
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            self.StrategyRegistry.register(
                strategy.strategy_name + suffix,
                strategy,
                description=f"Asynchronous SGD with parameter servers, workers by `{start_method}`",
                start_method=start_method,
            )

    def register_with_fabric(self, strategy: Any) -> None:
        """Let this tree's Fabric accept a strategy, and know it as ``"asgd"``."""
        self.DDPStrategy.register(strategy)
        self.STRATEGY_REGISTRY.register(strategy.strategy_name, strategy, description="Asynchronous SGD")


TREES = (
    Tree("pytorch_lightning", "lightning_fabric", "pytorch-lightning"),
    Tree("lightning.pytorch", "lightning.fabric", "lightning"),
)


FABRICS = (
    Tree("lightning_fabric", "lightning_fabric", "lightning-fabric"),
    Tree("lightning.fabric", "lightning.fabric", "lightning"),
)
"""The class trees below those, which a program with Fabric uses alone."""


def tree_of(thing: Any, trees: tuple[Tree, ...] = TREES) -> Tree:
    """The tree that an object of Lightning's belongs to."""
    for cls in type(thing).__mro__:
        for tree in trees:
            if f"{cls.__module__}.".startswith(f"{tree.package}."):
                return tree
    expected = " or ".join(tree.package for tree in trees)
    raise TypeError(f"{thing!r} is a {type(thing).__name__}. Expected an object of {expected}.")


class _NoTree:
    """Stands among the bases of :class:`CallbackExtension`: Python would not replace ``object`` there."""


class CallbackExtension(_NoTree):
    """Base of a callback that programs make: its subclasses are callbacks of every tree that is loaded.

    Trainers look for that, and so does the command line of Lightning before it makes an object of a class.
    """

    @classmethod
    def join(cls, tree: Tree) -> None:
        """Take a tree's ``Callback`` among the bases."""
        callback = importlib.import_module(f"{tree.package}.callbacks.callback").Callback
        CallbackExtension.__bases__ = (*CallbackExtension.__bases__, callback)


def when_imported(module: str, run: Callable[[Tree], None], trees: tuple[Tree, ...] = TREES) -> None:
    """Call ``run`` for every tree that has loaded a module of its own, now, and for the others once they load it."""
    waiting: dict[str, Callable[[], None]] = {}
    for tree in trees:
        if f"{tree.package}.{module}" in sys.modules:
            run(tree)
        else:
            waiting[f"{tree.package}.{module}"] = functools.partial(run, tree)
    sys.meta_path.insert(0, _Watch(waiting))


class _Watch:
    """A finder that finds nothing by itself: it only adds a call to what the others load."""

    def __init__(self, waiting: dict[str, Callable[[], None]]) -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        run = self._waiting.pop(name, None)
        if run is None:
            return None
        spec = importlib.util.find_spec(name)  # asks the other finders, since the name was taken out
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_run(module: types.ModuleType) -> None:
                load(module)
                run()

            spec.loader.exec_module = load_and_run  # type: ignore[method-assign]
        return spec


def is_foreign(environment: Any) -> bool:
    """Whether a cluster environment's class is none of Lightning's own: it may bring a world and ranks of its own."""
    module = type(environment).__module__
    return not any(f"{module}.".startswith(f"{tree.fabric}.") for tree in TREES)


def when_process_groups_are_made(tree: Tree, call: Callable[[int], None]) -> None:
    """Call something with the number of processes before one of the tree's own strategies makes its group."""
    for name in ("ddp", "fsdp", "model_parallel", "deepspeed"):
        module: Any = sys.modules.get(f"{tree.package}.strategies.{name}")
        make = private_names.make_process_group.of(module)
        if make is not None:
            private_names.make_process_group.set_of(module, functools.partial(_after, call, make))


def _after(
    call: Callable[[int], None], make: Callable[..., None], cluster_environment: Any, *args: Any, **kwargs: Any
) -> None:
    call(cluster_environment.world_size())
    make(cluster_environment, *args, **kwargs)


def looks_at_gradients(module: Any) -> bool:
    """Whether a program may see or change gradients between backward and the optimizer's step."""
    trainer = module.trainer
    if trainer.gradient_clip_val is not None or not module.automatic_optimization:
        return True
    if private_names.compiled.of(module) is not None:
        return True  # compiled forwards do not run the hooks of submodules
    tree = tree_of(trainer)
    hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step")
    bases = [(module, tree.LightningModule), *((callback, tree.Callback) for callback in trainer.callbacks)]
    return any(_is_overridden(one, base, hook) for one, base in bases for hook in hooks)


def _is_overridden(one: Any, base: Any, hook: str) -> bool:
    mine = getattr(type(one), hook, None)
    # Our callbacks are those of both trees, where both are loaded: their hooks may be the other tree's empty ones.
    return mine is not getattr(base, hook, None) and not getattr(mine, "__module__", "").endswith(".callbacks.callback")


def become_global_zero(rank: int) -> None:
    """Let Lightning log and warn in this process if ``rank`` is 0, and else not."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def forget_rank() -> None:
    """Let Lightning log and warn in this process, if it is loaded already and took a rank from the environment."""
    if "lightning_utilities.core.rank_zero" in sys.modules:
        become_global_zero(0)


def rank_zero_warn(message: str) -> None:
    """Warn on worker 0 only."""
    from lightning_utilities.core.rank_zero import rank_zero_warn

    rank_zero_warn(message, stacklevel=6)


@functools.cache
def _warn_once(message: str) -> None:
    rank_zero_warn(message)


def torchmetrics() -> Any:
    """The package of metrics that Lightning uses."""
    import torchmetrics

    return torchmetrics


def apply_to_collection(data: Any, dtype: Any, function: Callable[..., Any]) -> Any:
    """Apply ``function`` to everything of type ``dtype`` in nested containers."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(data, dtype, function)


def _tree_named(package: str) -> Tree:
    return next(tree for tree in (*TREES, *FABRICS) if tree.package == package)


def _blank(tree: Tree, extension: type, base: str) -> Any:
    cls = tree.derive(extension, base)
    return object.__new__(cls)
