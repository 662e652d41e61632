"""What checkpoints hold beside Lightning's own entries, what a fit resumes from, and where a joining worker starts.

The entries are versions, the servers' state, and every worker's optimizers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError, ServerLostError, WorkerLostError
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.class_trees import apply_to_collection, rank_zero_warn, tree_of
from lightning_asgd.tables.served.clients import served
from lightning_asgd.tables.served.embedding import ServedEmbedding

log = logging.getLogger(__name__)

_TABLES = "lightning_asgd_tables"  # a checkpoint's key of the name of its copies of served tables

KEY = "lightning_asgd"
"""Its key in the checkpoint."""


@dataclass
class Resumption:
    """What the next fit resumes from. Reading a checkpoint fills it; a fit that begins takes its values, once."""

    versions: list[int] | None = None  # per server, the version to continue from; None to begin with 0
    tables: Path | None = None  # where the checkpoint's served tables are; None if it has none
    servers: Sequence[Any] = ()  # what the servers kept beside the weights; empty if it does not fit the run
    data: Mapping[str, Any] = field(default_factory=dict)  # the part of the epoch that had been trained
    void: bool = False  # whether no fit follows

    def read(self, checkpoint: Mapping[str, Any], rank: int, algorithm: str, num_servers: int) -> Mapping[str, Any]:
        """Take what this worker needs from a checkpoint, which may be of another algorithm or number of servers.

        Returns its optimizer and scheduler state, by Lightning's keys; none for worker 0: Lightning finds that itself.
        """
        self.versions, self.servers, self.data = None, (), {}  # of a checkpoint that was read before
        entry = checkpoint.get(KEY)
        if not entry or self.void:
            return {}
        versions, self.data = list(entry["versions"]), entry.get("data", {})
        writer, servers = entry.get("algorithm", "ASGD"), entry.get("servers", ())
        same = len(versions) == num_servers
        fits = same and writer == algorithm
        self.versions, self.servers = versions if same else [max(versions)] * num_servers, servers if fits else ()
        if not fits and any(group.get("slots") for fragment in servers for shard in fragment for group in shard):
            rank_zero_warn(
                f"The checkpoint was written by {writer} with {len(versions)} servers but is read by {algorithm} with "
                f"{num_servers}: other state of the servers, such as momentum, starts from zero."
            )
        mine: Mapping[str, Any] = entry["workers"].get(rank, {})
        return mine

    def keep_for(self, checkpoint: Mapping[str, Any] | None) -> None:
        """Keep what a fit resumes from that begins with a checkpoint, as a program has left it; or with none."""
        if not checkpoint:
            self.forget()
        elif "loops" not in left_in(checkpoint):  # it begins with the first epoch
            self.data = {}

    def forget(self) -> None:
        """Forget what was read: it is not for the next fit, or no longer."""
        self.versions, self.servers, self.data, self.tables = None, (), {}, None

    @classmethod
    def of(cls, strategy: Any) -> Resumption:
        """The state that the strategy's next fit resumes from. For a test, an object that ignores checkpoints."""
        module = strategy.lightning_module
        trainer = None if module is None else private_names.module_trainer.of(module)
        fits = trainer is None or private_names.called_method(trainer) == strategy.tree.TrainerFn.FITTING
        found: Resumption = strategy._resume if fits else cls(void=True)
        return found

    def take(self, name: str) -> Any:
        """What was read by that name, once."""
        value = getattr(self, name)
        setattr(self, name, getattr(Resumption(), name))
        return value


@contextlib.contextmanager
def tables_saved(strategy: Any, checkpoint: dict[str, Any], path: Any) -> Iterator[None]:
    """Write the module's served tables beside a checkpoint that is written within, and note there which they are.

    Tables that were beside an earlier file of that name are removed after that. If there are no servers any more, the
    checkpoint is written without tables, and none are removed. An incomplete copy is removed. A copy that a test has
    loaded, and that the module still reads, is kept until a later save.
    """
    tables, session = _tables_of(strategy), strategy.fit_session
    if not tables or not strategy.is_global_zero:
        yield
        return
    copy, saved = secrets.token_hex(4), False
    try:
        if session is not None and session.last is not None:
            raise ServerLostError("The main process and its servers have exited.")
        for name, table in tables.items():
            table.save(_beside(path) / copy / name)
        checkpoint[_TABLES], saved = copy, True
    except (ServerLostError, WorkerLostError) as error:
        log.warning("The checkpoint %s does not include the served tables; they stay in their folders: %s", path, error)
    finally:
        if not saved:
            shutil.rmtree(_beside(path) / copy, ignore_errors=True)
    yield
    for each in _beside(path).glob("*") if saved else ():
        read = any(table.source == each / name for name, table in tables.items())  # by a test, on all workers
        if each.name != copy and not read:
            shutil.rmtree(each, ignore_errors=True)


def remove_tables(strategy: Any, path: Any) -> None:
    """Remove the served tables beside a checkpoint, if this worker has removed that."""
    if _tables_of(strategy) and strategy.is_global_zero:
        shutil.rmtree(_beside(path), ignore_errors=True)


def read_tables(strategy: Any, checkpoint: Mapping[str, Any], path: Any) -> Path | None:
    """Have the module's served tables read those beside a checkpoint until a fit begins; where these are."""
    tables = _tables_of(strategy)
    if tables and _TABLES not in checkpoint:
        log.warning("The checkpoint %s has no served tables: those in their folders are used as they are.", path)
    if not tables or _TABLES not in checkpoint:
        return None
    folder = _beside(path) / str(checkpoint[_TABLES])
    for name, table in tables.items():
        table.read_from(folder / name)
    return folder


def _tables_of(strategy: Any) -> dict[str, ServedEmbedding]:
    return {} if strategy.lightning_module is None else served(strategy.lightning_module)


def _beside(checkpoint: Any) -> Path:
    """The folder for the served tables of a checkpoint."""
    if "://" in str(checkpoint):
        raise ConfigurationError(
            f"The checkpoint {checkpoint} is not a local file, but the module has served tables, which are written "
            "beside it. Expected a path on a disk."
        )
    return Path(f"{os.path.realpath(checkpoint)}.tables")


def left_in(checkpoint: Mapping[str, Any]) -> set[str]:
    """What a program has left in a checkpoint of the entries that a fit resumes from."""
    return {key for key in ("optimizer_states", "lr_schedulers", "loops") if checkpoint.get(key)}


def states_in(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's optimizer and scheduler states in a checkpoint, on the CPU."""
    mine = {key: checkpoint[key] for key in left_in(checkpoint) - {"loops"}}
    return dict(apply_to_collection(mine, Tensor, lambda t: t.detach().cpu()))


def entry_of(
    versions: Sequence[int], algorithm: str, servers: Sequence[Any], workers: Mapping[int, Any], left: Collection[str]
) -> dict[str, Any]:
    """What worker 0 puts under :data:`KEY`; ``left`` says which of the workers' states."""
    return {
        "versions": list(versions),
        "algorithm": algorithm,
        "servers": list(servers),
        "workers": {r: {k: v for k, v in state.items() if k in left} for r, state in workers.items() if r != 0},
    }


# ---------------------------------------------------------------------- checkpoint callbacks

# Attributes of ModelCheckpoint that describe its files, and whether one is to be written after the next validation.
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
    private_names.save_deferred.attribute,
)


def checkpoint_states(trainer: Any) -> list[Any]:
    """The state of the Trainer's checkpoint callbacks that describes their files; tensors are on the CPU."""
    states = [vars(callback) for callback in trainer.checkpoint_callbacks]
    kept = [{key: state[key] for key in _CHECKPOINT_STATE if key in state} for state in states]
    return list(apply_to_collection(kept, Tensor, lambda t: t.detach().cpu()))


def is_last(trainer: Any, path: Any) -> bool:
    """Whether a callback is about to write a file that replaces the one before, as ``last.ckpt``."""
    return any(str(path) == getattr(each, "last_model_path", "") for each in trainer.checkpoint_callbacks)


def adopt_checkpoint_states(trainer: Any, states: list[Any], *, agrees: bool = False) -> None:
    """Give them the state of another worker's. With ``agrees`` the other one decides: ranks may log other values."""
    for callback, state in zip(trainer.checkpoint_callbacks, states, strict=True):
        vars(callback).update(state)
        if agrees and "best_k_models" in state:  # Lightning saves a file if its value is better on every rank
            worst = Tensor([float("inf" if callback.mode == "min" else "-inf")])[0]
            callback.best_k_models = dict.fromkeys(state["best_k_models"], worst)


def save_on_exception(trainer: Any, error: BaseException) -> None:
    """Let the Trainer's checkpoint callbacks save what they do when an exception is raised."""
    for callback in trainer.checkpoint_callbacks:
        callback.on_exception(trainer, trainer.lightning_module, error)


# ---------------------------------------------------------------------- progress of a run, for a worker that joins


def progress_of(trainer: Any) -> dict[str, Any]:
    """What a checkpoint would hold at an epoch's end, with optimizer settings in place of weights and states."""
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
    if not checkpoint or "optimizer_states" not in checkpoint or "loops" not in left_in(checkpoint):
        return None
    names = ("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers")
    states = [state["param_groups"] for state in checkpoint["optimizer_states"]]
    groups = [[{k: v for k, v in group.items() if k != "params"} for group in each] for each in states]
    between = private_names.is_between_epochs(checkpoint["loops"]["fit_loop"])
    found = {name: checkpoint[name] for name in names if name in checkpoint}
    return {**found, "groups": groups, "between_epochs": between}


def restart_epochs(trainer: Any) -> None:
    """After :func:`follow_progress`, when training begins: Lightning takes any state that it loads for mid-epoch."""
    for restarts in (private_names.epochs_restart, private_names.batches_restart, private_names.validation_restarts):
        restarts.set(trainer, False)


# Settings of an optimizer that say how it computes on its device, not what.
_OF_THE_DEVICE = ("foreach", "fused", "capturable")


def follow_progress(trainer: Any, progress: dict[str, Any] | None) -> None:
    """Have a fit begin where :func:`progress_of` was called, whatever checkpoint it was given.

    To be called while the strategy is set up, after the optimizers: Lightning then resumes from the same progress.
    """
    if private_names.loaded_checkpoint(trainer):
        rank_zero_warn("The checkpoint is not loaded: this worker joins a run that has already started.")
    private_names.loaded_checkpoint.set(trainer, progress or {})
    if progress is not None:
        private_names.load_callback_states(trainer)()
        for optimizer, groups in zip(trainer.optimizers, progress["groups"], strict=False):  # a program's may be empty
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update({n: _like(group.get(n), v) for n, v in settings.items() if n not in _OF_THE_DEVICE})


def _like(mine: Any, theirs: Any) -> Any:
    """Another worker's value: in this one's tensor on its device, where that is one (a learning rate, for instance)."""
    if isinstance(mine, Tensor):
        return mine.fill_(theirs)
    return theirs.item() if isinstance(theirs, Tensor) else theirs
