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
import operator
import sys
import types
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from lightning_asgd.adapter import name_check, private_names
from lightning_asgd.errors import ConfigurationError

__all__ = [
    "MALICIOUS",
    "CallbackExtension",
    "Extension",
    "StrategyExtension",
    "Tree",
    "adopt_checkpoint_states",
    "apply_to_collection",
    "become_global_zero",
    "begin_epochs_anew",
    "callback_modules",
    "checkpoint_states",
    "follow_progress",
    "forget_rank",
    "is_foreign",
    "keep_sigterm_local",
    "let_metrics_ask",
    "let_several_trainers_take",
    "looks_at_gradients",
    "progress_in",
    "progress_of",
    "rank_zero_warn",
    "save_on_exception",
    "synchronise_metrics",
    "tree_of",
    "when_batches_are_fetched",
    "when_epochs_end",
    "when_imported",
    "when_process_groups_are_made",
]

MALICIOUS = ("2.6.2", "2.6.3")
"""Releases of Lightning that held malicious code, and were withdrawn. pyproject.toml excludes them too."""

Extension: Any = object
"""Base of the classes that extend one of Lightning's: see :meth:`Tree.derive`."""

# What is imported of Lightning: its public names, by module, and private ones.
_PUBLIC = {
    "Callback": "callbacks",
    "LightningModule": "core",
    "DDPStrategy": "strategies",
    "StrategyRegistry": "strategies",
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

    Args:
        package: ``"pytorch_lightning"`` or ``"lightning.pytorch"``.
        fabric: the part below it.
        distribution: what pip calls it.
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
        raise AttributeError(f"{name!r} is not among the names that are used of Lightning")

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
                "and replace the passwords and keys that this machine can read: its code has been run."
            )

    def info(self, message: str) -> None:
        """Say something where Lightning says such things."""
        logging.getLogger(f"{self.package}.strategies.asgd").info(message)

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


TREES = (
    Tree("pytorch_lightning", "lightning_fabric", "pytorch-lightning"),
    Tree("lightning.pytorch", "lightning.fabric", "lightning"),
)


def tree_of(thing: Any) -> Tree:
    """The tree that an object of Lightning's belongs to."""
    for cls in type(thing).__mro__:
        for tree in TREES:
            if f"{cls.__module__}.".startswith(f"{tree.package}."):
                return tree
    raise TypeError(f"{thing!r} is a {type(thing).__name__}. Expected an object of pytorch_lightning or lightning.")


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


class StrategyExtension(private_names.StrategyHooks):
    """Base of a strategy: an object that a program makes is unattached, see :class:`Unattached`."""

    # Not in the strategy's own class: tools that look for its arguments would find these instead of __init__'s.
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object that waits for a Trainer."""
        return object.__new__(cls if issubclass(cls, Unattached) else unattached(cls))  # type: ignore[arg-type]

    _given: dict[str, Any]
    """Arguments of Lightning's ``DDPStrategy``."""

    @property
    def accelerator(self) -> Any:
        """The accelerator. Once a Trainer sets it, the strategy is one of the Trainer's tree."""
        return vars(self).get(private_names.accelerator.attribute, self._given["accelerator"])

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        tree = tree_of(accelerator)
        tree.check_release()
        strategy: Any = self
        _change_hands(strategy)
        strategy.__class__ = tree.derive(strategy.extension, "DDPStrategy")
        tree.DDPStrategy.__init__(strategy, **{**strategy._given, "accelerator": accelerator})


class Unattached(private_names.UnattachedHooks):
    """Base of strategies that no Trainer has taken yet."""


@functools.cache
def unattached(extension: Any) -> Any:
    """The class of objects of ``extension``, a strategy, that no Trainer has taken yet."""

    def reduce(self: Any, _: Any) -> Any:
        return _blank_unattached, (extension,), self.__dict__

    body: dict[str, Any] = {"__module__": extension.__module__, "__doc__": extension.__doc__}
    body |= {"__reduce_ex__": reduce, "extension": extension}
    return types.new_class(extension.__name__, (Unattached, extension), exec_body=lambda space: space.update(body))


# Of a strategy: the part of the Trainer that has it, and that of the one that is being made with it.
_holders: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_takers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def let_several_trainers_take(tree: Tree) -> None:
    """Let Trainers of a tree take a strategy that another one has taken before.

    A Trainer refuses arguments that its strategy has already, and uses the strategy's devices rather than its own.
    While it looks at one of ours, that has only what the program gave it.
    """
    connector = private_names.trainer_connector.imported(tree)
    check = private_names.check_strategy.of(connector)

    @functools.wraps(check)
    def check_as_unattached(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = kwargs.get("strategy", args[0] if args else None)
        if not isinstance(strategy, StrategyExtension):
            return check(self, *args, **kwargs)
        _check_is_free(strategy)
        before: Any = type(strategy)
        _takers[strategy] = weakref.ref(self)
        strategy.__class__ = unattached(before.extension)
        try:
            return check(self, *args, **kwargs)
        finally:
            strategy.__class__ = before

    private_names.check_strategy.set_of(connector, check_as_unattached)


def _change_hands(strategy: Any) -> None:
    """Let the Trainer that has had a strategy keep a copy: its module, its launcher and what else came of its runs."""
    holder = _holders.get(strategy, lambda: None)()
    if holder is not None and holder.strategy is strategy:
        copy = object.__new__(type(strategy))
        vars(copy).update(vars(strategy))
        if getattr(copy.launcher, "strategy", None) is strategy:
            copy.launcher.strategy = copy
        holder.strategy = copy
        _holders[copy] = weakref.ref(holder)
    if strategy in _takers:
        _holders[strategy] = _takers.pop(strategy)


def _check_is_free(strategy: Any) -> None:
    """Raise if a Trainer runs with a strategy."""
    module = vars(strategy).get(private_names.strategy_module.attribute)
    trainer = getattr(module, private_names.module_trainer.attribute, None)
    if trainer is not None and trainer.strategy is strategy and private_names.status(trainer) == "running":
        method = private_names.called_method(trainer).value
        raise ConfigurationError(
            f"Trainer(strategy=...) was given the {type(strategy).__name__} of a Trainer that is running "
            f"{method}. Expected one that no Trainer uses at the time. Make another "
            f"{type(strategy).__name__}, or wait until the first Trainer is through."
        )


def when_imported(module: str, run: Callable[[Tree], None]) -> None:
    """Call ``run`` for every tree that has loaded a module of its own, now, and for the others once they load it."""
    waiting: dict[str, Callable[[], None]] = {}
    for tree in TREES:
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


def metrics_of(*owners: Any) -> list[Any]:
    """Every torchmetrics ``Metric`` of modules and callbacks, also those in their plain lists and dictionaries."""
    import torchmetrics
    from torch.nn import Module

    def parts(thing: Any) -> list[Any]:
        return list(thing.modules()) if isinstance(thing, Module) else [thing]

    found: dict[int, Any] = {}
    for part in (part for owner in owners for part in parts(owner)):
        for value in (part, *vars(part).values()):
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            found |= {id(m): m for item in held for m in parts(item) if isinstance(m, torchmetrics.Metric)}
    return list(found.values())


@functools.cache
def let_metrics_ask(distributed_available: Callable[[], bool]) -> None:
    """Have every torchmetrics ``Metric`` that is made from now on ask this before it syncs with other processes."""
    from torchmetrics.metric import Metric, jit_distributed_available

    make = Metric.__init__

    @functools.wraps(make)
    def make_and_ask(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.distributed_available_fn is jit_distributed_available:
            self.distributed_available_fn = _InPlaceOf(jit_distributed_available, distributed_available)

    Metric.__init__ = make_and_ask


def when_process_groups_are_made(tree: Tree, call: Callable[[], None]) -> None:
    """Have something called before one of the tree's own strategies, such as DDP, makes its process group."""
    for name in ("ddp", "fsdp", "model_parallel", "deepspeed"):
        module: Any = sys.modules.get(f"{tree.package}.strategies.{name}")
        make = private_names.make_process_group.of(module)
        if make is not None:
            private_names.make_process_group.set_of(module, functools.partial(_after, call, make))


def _after(call: Callable[[], None], make: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    call()
    make(*args, **kwargs)


def keep_sigterm_local(trainer: Any) -> Callable[[], None]:
    """Keep Lightning from asking worker 0 for a SIGTERM before every batch, by torch.distributed (since 2.5.2).

    That would put all workers in lock-step with worker 0. A worker that gets the signal ends after its batch, as it
    does without a process group.
    """

    def note(signum: int, _: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not private_names.sigterm_came(trainer):
            launcher.kill(signum)
        private_names.sigterm_came.set(trainer, True)

    undo_note = private_names.note_sigterm.replace(trainer, note)
    undo_broadcast = private_names.broadcast_sigterm.replace(trainer, lambda: None)

    def undo() -> None:
        undo_note()
        undo_broadcast()

    return undo


def synchronise_metrics(available: Callable[[], bool], gather: Callable[..., Any], *owners: Any) -> None:
    """Have every metric of modules and callbacks measure over all workers while ``available()`` says they meet."""
    for metric in metrics_of(*owners):
        for name, function in (("distributed_available_fn", available), ("dist_sync_fn", gather)):
            before = getattr(metric, name)
            before = before.before if isinstance(before, _InPlaceOf) else before
            setattr(metric, name, _InPlaceOf(before, function))


class _InPlaceOf:
    """A function in the place of one that a metric had. It belongs to this run: a saved metric has the other again."""

    def __init__(self, before: Any, function: Callable[..., Any]) -> None:
        self.before, self._function = before, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _InPlaceOf:
        return self

    def __reduce__(self) -> Any:
        return operator.itemgetter(0), ((self.before,),)


def callback_modules(trainer: Any) -> list[Any]:
    """Modules that callbacks keep beside the one that is trained: averages of its weights, for instance."""
    from torch.nn import Module

    held = (value for callback in trainer.callbacks for value in vars(callback).values())
    return [value for value in held if isinstance(value, Module) and value is not trainer.lightning_module]


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


# Attributes of ModelCheckpoint that tell what files there are.
_CHECKPOINT_STATE = (
    "best_model_path",
    "best_model_score",
    "best_k_models",
    "kth_best_model_path",
    private_names.kth_score.attribute,
    "current_score",
    "last_model_path",
    private_names.last_saved.attribute,
    private_names.last_step_saved.attribute,
)


def checkpoint_states(trainer: Any) -> list[Any]:
    """What the Trainer's checkpoint callbacks know of the files; tensors are on the CPU."""
    from torch import Tensor

    states = [vars(callback) for callback in trainer.checkpoint_callbacks]
    kept = [{key: state[key] for key in _CHECKPOINT_STATE if key in state} for state in states]
    return list(apply_to_collection(kept, Tensor, lambda t: t.detach().cpu()))


def save_on_exception(trainer: Any, error: BaseException) -> None:
    """Let the Trainer's checkpoint callbacks save what they do when an exception is raised."""
    for callback in trainer.checkpoint_callbacks:
        callback.on_exception(trainer, trainer.lightning_module, error)


def adopt_checkpoint_states(trainer: Any, states: list[Any]) -> None:
    """Let the Trainer's checkpoint callbacks know what those of another worker do: see :func:`checkpoint_states`."""
    for callback, state in zip(trainer.checkpoint_callbacks, states, strict=True):
        vars(callback).update(state)


def when_epochs_end(trainer: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Have something called after an epoch's last hook, before the loop decides to go on. Returns the undo."""

    def end_and_call() -> None:
        private_names.end_epoch.original(trainer)()
        call()

    return private_names.end_epoch.replace(trainer, end_and_call)


def when_data_are_set_up(trainer: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Have something called whenever Lightning has set up training data, and counted their batches.

    At once if it has already: a ``setup`` hook may have asked for numbers that depend on them.
    """

    def set_up_and_call() -> None:
        before = private_names.combined_loader(trainer)
        private_names.set_up_data.original(trainer)()
        if private_names.combined_loader(trainer) is not before:
            call()

    undo = private_names.set_up_data.replace(trainer, set_up_and_call)
    if private_names.combined_loader(trainer) is not None:
        call()
    return undo


def progress_of(trainer: Any) -> dict[str, Any]:
    """What a checkpoint would hold at an epoch's end, but for weights and optimizer states.

    In place of these stand the optimizers' settings, such as the learning rates, which schedules go on from.
    """
    from torch import Tensor

    tree = tree_of(trainer)
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in trainer.optimizers]
    progress = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": tree.version,
        "loops": private_names.loop_states(trainer)(),
        "callbacks": tree.callback_states(trainer),
        "lr_schedulers": [config.scheduler.state_dict() for config in private_names.schedules(trainer)],
        "groups": groups,
        "between_epochs": True,
    }
    return dict(apply_to_collection(progress, Tensor, lambda t: t.detach().cpu()))


def progress_in(trainer: Any) -> dict[str, Any] | None:
    """The same from the checkpoint that a fit is about to begin with; None without one."""
    checkpoint = private_names.loaded_checkpoint(trainer)
    if not checkpoint or "optimizer_states" not in checkpoint:
        return None
    names = ("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers")
    states = [state["param_groups"] for state in checkpoint["optimizer_states"]]
    groups = [[{k: v for k, v in group.items() if k != "params"} for group in each] for each in states]
    between = private_names.is_between_epochs(checkpoint["loops"]["fit_loop"])
    found = {name: checkpoint[name] for name in names if name in checkpoint}
    return {**found, "groups": groups, "between_epochs": between}


def begin_epochs_anew(trainer: Any) -> None:
    """After :func:`follow_progress`, when training begins: Lightning takes any state that it loads for mid-epoch."""
    for restarts in (private_names.epochs_restart, private_names.batches_restart, private_names.validation_restarts):
        restarts.set(trainer, False)


# Settings of an optimizer that say how it computes on its device, not what.
_OF_THE_DEVICE = ("foreach", "fused", "capturable")


def follow_progress(trainer: Any, progress: dict[str, Any] | None) -> None:
    """Have a fit begin where :func:`progress_of` was called, whatever checkpoint it was given.

    To be called while the strategy is set up, after the optimizers: Lightning goes on from the same place afterwards.
    """
    if private_names.loaded_checkpoint(trainer):
        rank_zero_warn("The checkpoint is not loaded: this worker takes part in a run that has begun.")
    private_names.loaded_checkpoint.set(trainer, progress or {})
    if progress is not None:
        private_names.load_callback_states(trainer)()
        for optimizer, groups in zip(trainer.optimizers, progress["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update({n: _like(group.get(n), v) for n, v in settings.items() if n not in _OF_THE_DEVICE})


def _like(mine: Any, theirs: Any) -> Any:
    """Another worker's value: in this one's tensor on its device, where that is one (a learning rate, for instance)."""
    from torch import Tensor

    if isinstance(mine, Tensor):
        return mine.fill_(theirs)
    return theirs.item() if isinstance(theirs, Tensor) else theirs


def become_global_zero(rank: int) -> None:
    """Let Lightning log and warn in this process if ``rank`` is 0, and else not."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def forget_rank() -> None:
    """Let Lightning log and warn in this process, if it is loaded already and took a rank from the environment."""
    if "lightning_utilities.core.rank_zero" in sys.modules:
        become_global_zero(0)


def when_batches_are_fetched(trainer: Any, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Have something called around every wait for a training batch, from the next epoch on. Returns the undo."""

    def call_and_start() -> None:
        before()
        private_names.before_fetch.original(trainer)()

    def stop_and_call() -> None:
        private_names.after_fetch.original(trainer)()
        after()

    undo_before = private_names.before_fetch.replace(trainer, call_and_start)
    undo_after = private_names.after_fetch.replace(trainer, stop_and_call)

    def undo() -> None:
        undo_before()
        undo_after()

    return undo


def rank_zero_warn(message: str) -> None:
    """Warn on worker 0 only."""
    from lightning_utilities.core.rank_zero import rank_zero_warn

    rank_zero_warn(message, stacklevel=6)


@functools.cache
def _warn_once(message: str) -> None:
    rank_zero_warn(message)


def apply_to_collection(data: Any, dtype: Any, function: Callable[..., Any]) -> Any:
    """Apply ``function`` to everything of type ``dtype`` in nested containers."""
    from lightning_utilities.core.apply_func import apply_to_collection

    return apply_to_collection(data, dtype, function)


def _tree_named(package: str) -> Tree:
    return next(tree for tree in TREES if tree.package == package)


def _blank_unattached(extension: type) -> Any:
    return object.__new__(unattached(extension))


def _blank(tree: Tree, extension: type, base: str) -> Any:
    cls = tree.derive(extension, base)
    return object.__new__(cls)
