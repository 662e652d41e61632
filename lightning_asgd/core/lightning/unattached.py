"""Strategies without a Trainer yet, and strategies that several Trainers use one after the other."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.settings import refuse
from lightning_asgd.core.foundation.validation import call_of
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.class_trees import TREES, Tree, tree_of

# Arguments of DDP's that could only change how it reduces gradients, and what to give instead of some others.
_UNNEEDED = (
    *("bucket_cap_mb", "check_reduction", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"),
    "process_group_backend",
)
_INSTEAD = {"ddp_comm_hook": "compression='bf16' or another codec", "timeout": "timeouts=Timeouts(collective_s=...)"}


def passed_on(
    accelerator: Any = None,
    parallel_devices: list[Any] | None = None,
    cluster_environment: Any = None,
    checkpoint_io: Any = None,
    precision_plugin: Any = None,
    **others: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide arguments into those of Lightning's strategies, which ``LightningCLI`` finds here, and others."""
    given = dict(locals())
    return given, given.pop("others")


class Takeable:
    """A strategy that Trainers take: an object that a program makes is unattached, see :class:`Unattached`."""

    # Not in the strategy's own class: tools that look for its arguments would find these instead of __init__'s.
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object that waits for a Trainer."""
        return object.__new__(cls if issubclass(cls, Unattached) else unattached(cls))  # type: ignore[arg-type]

    _given: dict[str, Any]
    """Arguments of Lightning's ``DDPStrategy``."""
    options: Any
    """The program's arguments."""
    trees = TREES
    """Those whose Trainers, or Fabric, can take it."""
    _call = "A-SGD's strategy"  # that made it
    _unneeded: tuple[str, ...] = ()  # arguments of DDP's that it was given

    def __repr__(self) -> str:
        return self._call

    def _record_call(self, init: Callable[..., None], given: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Remember the call. Raise a :class:`ConfigurationError` for an argument that neither it nor DDP has."""
        from torch.nn.parallel import DistributedDataParallel

        kinds = DistributedDataParallel, *(tree.DDPStrategy for tree in self.trees if tree.version)
        of_ddp = {name for kind in kinds for name in inspect.signature(kind).parameters} if others else set()
        signature = inspect.signature(init).parameters.values()
        usual = {p.name: p.default for p in signature if p.default is not p.empty} | dict.fromkeys(self._given)
        for name, value in others.items():
            if name not in of_ddp:
                refuse(name, value, usual)
            if given.get("island") is not None:
                raise ConfigurationError(f"{name}={value!r}. Expected island=DDPStrategy({name}={value!r}).")
            if name not in _UNNEEDED:
                expected = _INSTEAD.get(name, "it to be left out")
                raise ConfigurationError(f"{name}={value!r} is an argument of DDP's. Expected {expected}.")
        self._unneeded = tuple(others)
        self._call = call_of(type(self).__name__, {n: {**self._given, **given}[n] for n in usual} | {**others}, usual)

    @property
    def accelerator(self) -> Any:
        """The accelerator. Once a Trainer sets it, the strategy is one of the Trainer's tree."""
        return vars(self).get(private_names.accelerator.attribute, self._given["accelerator"])

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        tree = tree_of(accelerator, self.trees)
        tree.check_release()
        _check_supports(self, tree, accelerator)
        strategy: Any = self
        _change_hands(strategy)
        self._become(tree, accelerator)
        for name in self._unneeded:
            tree.say(f"{name}: an argument of DDP's that is not needed here.")

    def _become(self, tree: Tree, accelerator: Any) -> None:
        """Become a strategy of a tree."""
        strategy: Any = self
        strategy.__class__ = tree.derive(strategy.extension, "DDPStrategy")
        tree.DDPStrategy.__init__(strategy, **{**strategy._given, "accelerator": accelerator})


class StrategyExtension(private_names.CommonHooks, Takeable):
    """Base of a strategy whose workers are one process each."""


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


@functools.cache
def _as_checked(tree: Tree, extension: Any) -> Any:
    """The class of a strategy while a tree's Trainers check their arguments: it does not belong to the DDP family."""
    # On MPS they refuse that family outright; see :func:`_check_supports`.
    seen = types.new_class(extension.__name__, (Unattached, StrategyExtension))
    tree.Strategy.register(seen)
    return seen


# By strategy: the connector of the Trainer that has it, and of the Trainer that is taking it.
_holders: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

_takers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def let_several_trainers_take(tree: Tree) -> None:
    """Let Trainers of a tree take a strategy that another one has taken before.

    A Trainer refuses arguments that its strategy has already, and uses the strategy's devices rather than its own.
    While it checks one of ours, that has only the arguments that the program gave.
    """
    connector = private_names.trainer_connector.imported(tree)
    check = private_names.check_strategy.of(connector)

    @functools.wraps(check)
    def check_as_unattached(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = kwargs.get("strategy", args[0] if args else None)
        if not isinstance(strategy, Takeable):
            return check(self, *args, **kwargs)
        _check_is_free(strategy)
        before: Any = type(strategy)
        _takers[strategy] = weakref.ref(self)
        strategy.__class__ = _as_checked(tree, before.extension)
        try:
            return check(self, *args, **kwargs)
        finally:
            strategy.__class__ = before

    private_names.check_strategy.set_of(connector, check_as_unattached)


def _change_hands(strategy: Any) -> None:
    """Leave the previous Trainer a copy of the strategy, with its module, its launcher and the results of its runs."""
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


def _check_supports(strategy: Takeable, tree: Tree, accelerator: Any) -> None:
    """Raise if a Trainer would have to start several workers on an accelerator for which Lightning starts none."""
    if isinstance(accelerator, tree.MPSAccelerator) and strategy.options.run is None:
        name = type(strategy).__name__
        raise ConfigurationError(
            f"Trainer(strategy={name}(...)) was given the accelerator MPS. Expected a strategy for a single device, "
            f"since Lightning starts no workers on MPS. Pass {name}(run='host:port/name') and devices=1 "
            "to train in an elastic run, whose servers are started with `lightning-asgd serve`, or pass "
            "accelerator='cpu'."
        )


def _check_is_free(strategy: Any) -> None:
    """Raise if a Trainer runs with a strategy."""
    module = vars(strategy).get(private_names.strategy_module.attribute)
    trainer = getattr(module, private_names.module_trainer.attribute, None)
    if trainer is not None and trainer.strategy is strategy and private_names.status(trainer) == "running":
        method = private_names.called_method(trainer).value
        raise ConfigurationError(
            f"Trainer(strategy=...) was given the {type(strategy).__name__} of a Trainer that is running {method}. "
            f"Expected a strategy that no Trainer is using. Make another {type(strategy).__name__}, or wait until the "
            f"first Trainer has finished."
        )


def _blank_unattached(extension: type) -> Any:
    return object.__new__(unattached(extension))
