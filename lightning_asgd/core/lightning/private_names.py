"""The private and undocumented names of Lightning that this package uses, each with its purpose.

No other file contains such a name. ``name_check.py`` looks for all of them before a fit begins.
Other files use a :class:`Name` through the variable that holds it: ``batch_in_epoch(trainer)`` reads an attribute of a
part of the Trainer. The classes at the end have the methods that Lightning calls, and call methods of this package.
"""

from __future__ import annotations

import functools
import importlib
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_asgd.core.job import rank_variables

OLDEST, LATEST, BELOW = "2.5.0", "2.6.6", "2.7"
"""The oldest and latest release that these names were checked in, and the first release that is not supported."""

# Kinds of names, and what they are used for.
MODULE, CLASS, INSTANCE, SIGNATURE = "module", "class attribute", "instance attribute", "signature"
STARTING = "start workers"
TAKING = "be taken by a Trainer"
STEPS = "count steps as all workers do"
MEETING = "let workers meet within an epoch"
LEASES = "lease training data"
DATA = "find the training data"
SAVING = "save and resume progress"
SIGNALS = "handle signals in each worker by itself"
BARS = "show how many batches are expected"
LOOKING = "detect compiled modules"
LOGGING = "log what workers do"
STALLS = "measure data stalls"
TIMING = "time a training step"

ALTERNATIVES = {LEASES: "pass data='split'"}
"""Settings with which the names for a purpose are not needed."""


def import_from(tree: Any, module: str) -> Any:
    """A module of a tree. The prefix ``fabric.`` stands for the tree's fabric package."""
    inner = module.removeprefix("fabric.")
    return importlib.import_module(f"{tree.package if inner == module else tree.fabric}.{inner}")


@dataclass(frozen=True)
class Name:
    """One name in Lightning.

    The path begins at a module (``module:Class``, ``module:Class.attribute``, or ``module:Class().attribute``) or at a
    Trainer (``fit_loop.max_batches``). For a signature it ends with the parameters that this package relies on.
    """

    path: str
    kind: str
    used_for: str
    since: str = OLDEST
    changed: str = ""
    """The releases that changed it, and how."""
    otherwise: str = ""
    """What happens if it is missing, where that is not an error."""

    @functools.cached_property
    def module(self) -> str:
        """The module that it is imported from; empty for a part of a Trainer."""
        return self.path.rpartition(":")[0]

    @functools.cached_property
    def parts(self) -> list[str]:
        """The attributes that lead from the module or the Trainer to it."""
        path = self.path.rpartition(":")[2]
        return (path.rpartition("(")[0] if self.kind == SIGNATURE else path).split(".")

    @functools.cached_property
    def attribute(self) -> str:
        """The last of these attributes."""
        return self.parts[-1]

    @functools.cached_property
    def parameters(self) -> list[str]:
        """The parameters that this package relies on."""
        return re.findall(r"\w+", self.path.rpartition("(")[2]) if self.kind == SIGNATURE else []

    def imported(self, tree: Any) -> Any:
        """Its value in a module of a tree."""
        return getattr(import_from(tree, self.module), self.attribute)

    def of(self, owner: Any) -> Any:
        """Its value in the object that has it; None if it is optional and missing."""
        return getattr(owner, self.attribute, None) if self.otherwise else getattr(owner, self.attribute)

    def set_of(self, owner: Any, value: Any) -> None:
        """Set its value in the object that has it."""
        setattr(owner, self.attribute, value)

    @functools.cached_property
    def _owner(self) -> Callable[[Any], Any]:
        return operator.attrgetter(".".join(self.parts[:-1])) if len(self.parts) > 1 else lambda trainer: trainer

    def __call__(self, trainer: Any) -> Any:
        """Its value in a part of a Trainer."""
        return self.of(self._owner(trainer))

    def set(self, trainer: Any, value: Any) -> None:
        """Set its value in a part of a Trainer."""
        self.set_of(self._owner(trainer), value)

    def shift(self, trainer: Any, by: int) -> None:
        """Add to it, the counter of one stage of Lightning's progress, and to the counters of the other stages."""
        shift(vars(self._owner(trainer)), by)

    def original(self, trainer: Any) -> Any:
        """The method of a part of a Trainer, also while it is replaced."""
        owner = self._owner(trainer)
        return getattr(type(owner), self.attribute).__get__(owner)

    def replace(self, trainer: Any, function: Callable[..., Any]) -> Callable[[], None]:
        """Replace a method of a part of a Trainer. Returns a function that restores it."""
        owner = self._owner(trainer)
        vars(owner)[self.attribute] = function
        return lambda: vars(owner).pop(self.attribute, None)


def shift(counts: dict[str, int], by: int) -> None:
    """Add to the counters of all stages of Lightning's progress."""
    for name in counts:
        counts[name] += by


# ---------------------------------------------------------------------- imported names

script_launcher = Name("strategies.launchers:_SubprocessScriptLauncher", MODULE, STARTING)
multi_process_launcher = Name("strategies.launchers:_MultiProcessingLauncher", MODULE, STARTING)
set_num_threads = Name("fabric.utilities.distributed:_set_num_threads_if_needed(num_processes)", SIGNATURE, STARTING)
restart_random_numbers = Name("fabric.utilities.seed:reset_seed()", SIGNATURE, STARTING)
optimizers_to_device = Name("fabric.utilities.optimizer:_optimizers_to_device(optimizers, device)", SIGNATURE, STARTING)
configure_optimizers = Name("core.optimizer:_configure_optimizers(optim_conf)", SIGNATURE, TIMING)
callback_states = Name("trainer.call:_call_callbacks_state_dict(trainer)", SIGNATURE, SAVING)
trainer_connector = Name("trainer.connectors.accelerator_connector:_AcceleratorConnector", MODULE, TAKING)
check_strategy = Name(f"{trainer_connector.path}._check_config_and_set_final_flags(strategy)", SIGNATURE, TAKING)
make_process_group = Name("strategies.ddp:_init_dist_connection", MODULE, TAKING, otherwise="DDP may find ours")

# Classes that are recognised by their names, since a program's object may belong to either tree.
prefetching = Name("loops.fetchers:_PrefetchDataFetcher", MODULE, LEASES)
sampler_wrapper = Name("fabric.utilities.distributed:DistributedSamplerWrapper", MODULE, LEASES)
sigterm = Name("utilities.exceptions:SIGTERMException", MODULE, SIGNALS)
one_machine = Name("fabric.plugins.environments:LightningEnvironment", MODULE, STARTING)
tensorboard = Name("loggers:TensorBoardLogger", MODULE, LOGGING, otherwise="TensorBoard gets no histograms")
_EMPTIED = "another chief may empty its files"
csv_logger = Name("loggers:CSVLogger", MODULE, LOGGING, otherwise=_EMPTIED)
csv_version = Name("fabric.loggers:CSVLogger('')._version", INSTANCE, LOGGING, otherwise=_EMPTIED)
wandb_logger = Name("loggers:WandbLogger", MODULE, LOGGING, otherwise="Weights & Biases gets no histograms and tables")


def is_a(thing: Any, kind: Name) -> bool:
    """Whether an object's class, or one of its base classes, has this name."""
    return any(cls.__name__ == kind.attribute for cls in type(thing).__mro__)


# ---------------------------------------------------------------------- strategies, modules, callbacks

_STRATEGY = "strategies:DDPStrategy()"
accelerator = Name(f"{_STRATEGY}._accelerator", INSTANCE, TAKING)
start_method = Name(f"{_STRATEGY}._start_method", INSTANCE, STARTING)
backward_sync_control = Name("fabric.strategies:DDPStrategy()._backward_sync_control", INSTANCE, TAKING)
data_parallel_size = Name("strategies:ModelParallelStrategy()._data_parallel_size", INSTANCE, STARTING)
tensor_parallel_size = Name("strategies:ModelParallelStrategy()._tensor_parallel_size", INSTANCE, STARTING)
layer_sync = Name(f"{_STRATEGY}._layer_sync", INSTANCE, STARTING)
averaging_period = Name(f"{_STRATEGY}._model_averaging_period", INSTANCE, STARTING)
strategy_module = Name(f"{_STRATEGY}._lightning_module", INSTANCE, TAKING)
optimizers = Name(f"{_STRATEGY}._optimizers", INSTANCE, TAKING)
wrapped_optimizers = Name(f"{_STRATEGY}._lightning_optimizers", INSTANCE, TAKING)

module_trainer = Name("core:LightningModule()._trainer", INSTANCE, TAKING)
compiled = Name("core:LightningModule()._compiler_ctx", INSTANCE, LOOKING, otherwise="compiled modules are not noticed")
to_device = Name("core:LightningModule._apply_batch_transfer_handler(batch, device)", SIGNATURE, TIMING)

_KEPT = "another worker that takes over writing checkpoints does not know it"
_SAVER = "callbacks:ModelCheckpoint()"
kth_score = Name(f"{_SAVER}.kth_value", INSTANCE, SAVING, otherwise=_KEPT)
last_saved = Name(f"{_SAVER}._last_checkpoint_saved", INSTANCE, SAVING, otherwise=_KEPT)
last_step_saved = Name(f"{_SAVER}._last_global_step_saved", INSTANCE, SAVING, otherwise=_KEPT)
save_deferred = Name(f"{_SAVER}._defer_save_until_validation", INSTANCE, SAVING, since="2.5.5", otherwise="none waits")
steps_between_checkpoints = Name(f"{_SAVER}._every_n_train_steps", INSTANCE, LEASES, otherwise="some are missed")
rate_monitor = Name("callbacks:LearningRateMonitor", MODULE, LOGGING)
accumulation_in = Name(
    *("callbacks:GradientAccumulationScheduler.get_accumulate_grad_batches(epoch)", SIGNATURE, LEASES),
    otherwise="the value of the previous epoch is used",
)
_SHOWN = "the progress bar shows the number of batches that Lightning counts"
tqdm_bar = Name("callbacks:TQDMProgressBar()._train_progress_bar", INSTANCE, BARS, otherwise=_SHOWN)
rich_bar = Name("callbacks:RichProgressBar().progress", INSTANCE, BARS, otherwise=_SHOWN)
rich_task = Name("callbacks:RichProgressBar().train_progress_bar_id", INSTANCE, BARS, otherwise=_SHOWN)

# ---------------------------------------------------------------------- the Trainer

called_method = Name("state.fn", INSTANCE, TAKING)  # a member of Lightning's TrainerFn
status = Name("state.status", INSTANCE, TAKING)
may_replace_samplers = Name("_accelerator_connector.use_distributed_sampler", INSTANCE, LEASES)
validates_after = Name("val_check_batch", INSTANCE, LEASES, since="2.6.0", changed="2.6.0: at once, may be None")
validation_interval_s = Name("_val_check_time_interval", INSTANCE, LEASES, since="2.6.0", otherwise="clocks are missed")
schedules = Name("lr_scheduler_configs", INSTANCE, LEASES)
log_row = Name("_logger_connector.update_train_step_metrics()", SIGNATURE, LOGGING)
first_batch_flag = Name("_logger_connector._first_loop_iter", INSTANCE, MEETING)
sigterm_came = Name("_signal_connector.received_sigterm", INSTANCE, SIGNALS)
note_sigterm = Name("_signal_connector._sigterm_notifier_fn(signum)", SIGNATURE, SIGNALS, changed="2.5.2")
requeue_job = Name("_signal_connector._slurm_sigusr_handler_fn(signum)", SIGNATURE, SIGNALS)
restore_progress = Name("_checkpoint_connector.restore_training_state()", SIGNATURE, SAVING)
loaded_checkpoint = Name("_checkpoint_connector._loaded_checkpoint", INSTANCE, SAVING, changed="2.5.1, 2.6.0")
load_callback_states = Name("_checkpoint_connector.restore_callbacks()", SIGNATURE, SAVING)
loop_states = Name("_checkpoint_connector._get_loops_state_dict()", SIGNATURE, SAVING)


def is_between_epochs(loops: dict[str, Any]) -> bool:
    """Whether a checkpoint was written between two epochs. ``loops`` is the fit loop's state in it."""
    return len({*map(loops["epoch_progress"]["current"].get, ("ready", "started", "processed", "completed"))}) == 1


# ---------------------------------------------------------------------- the fit loop: epochs and their data

combined_loader = Name("fit_loop._combined_loader", INSTANCE, DATA)
loaders = Name("utilities.combined_loader:CombinedLoader.flattened", CLASS, DATA)
combination = Name("utilities.combined_loader:CombinedLoader([])._mode", INSTANCE, LEASES)
loader_iterator = Name("utilities.combined_loader:CombinedLoader([])._iterator", INSTANCE, LEASES)
opened_loaders = Name("utilities.combined_loader:_ModeIterator([]).iterators", INSTANCE, LEASES)
set_up_data = Name("fit_loop.setup_data()", SIGNATURE, DATA, changed="2.6.0, 2.6.4")
expected_batches = Name("fit_loop.max_batches", INSTANCE, DATA)
fetcher = Name("fit_loop._data_fetcher", INSTANCE, LEASES)
fetcher_length = Name(f"{prefetching.path}().length", INSTANCE, LEASES)
fetcher_done = Name(f"{prefetching.path}().done", INSTANCE, LEASES)
epochs_begun = Name("fit_loop.epoch_progress.current.processed", INSTANCE, LEASES)
resumes_epoch = Name("fit_loop.restarting", INSTANCE, LEASES, changed="2.5.2, 2.6.0: which states are restarts")
trains_statistics_only = Name("fit_loop._skip_backward", INSTANCE, LEASES)
end_epoch = Name("fit_loop.on_advance_end()", SIGNATURE, MEETING)
may_stop_early = Name("fit_loop._can_stop_early", INSTANCE, MEETING)
epochs_restart = Name("fit_loop._restarting", INSTANCE, SAVING)
batches_restart = Name("fit_loop.epoch_loop._restarting", INSTANCE, SAVING)
validation_restarts = Name("fit_loop.epoch_loop.val_loop._restarting", INSTANCE, SAVING)


def training_loaders(trainer: Any) -> list[Any]:
    """The training dataloaders; none before they are set up, or while a search for a batch size has removed them."""
    combined = combined_loader(trainer)
    return [] if combined is None else list(loaders.of(combined))


def replace_combined(trainer: Any, combined: Any) -> None:
    """Have the training data be what another object yields in the place of the combined dataloaders."""
    combined_loader.set(trainer, combined)
    fetcher(trainer).setup(combined)


def deals_samples_out(sampler: Any) -> bool:
    """Whether a sampler is torch's ``DistributedSampler``, or Lightning's wrapper around a user's sampler."""
    kinds = "torch.utils.data.distributed.DistributedSampler", sampler_wrapper.path.replace(":", ".")
    return f"{type(sampler).__module__}.{type(sampler).__name__}".endswith(kinds)


def replace_batch_sampler(loader: Any, sampler: Any) -> None:
    """Give a training dataloader another batch sampler."""
    # DataLoader refuses to set it because other attributes depend on it. None of those is used here.
    object.__setattr__(loader, "batch_sampler", sampler)
    # With persistent_workers=True the loader keeps its iterator, which would continue with the previous sampler.
    loader._iterator = None


def keep_fetching(trainer: Any) -> None:
    """Have batches fetched until the sampler ends, whatever length the loader has."""
    fetcher_length.set_of(fetcher(trainer), float("inf"))
    fetcher_done.set_of(fetcher(trainer), False)


def program_seed() -> int:
    """The seed that the program gave to ``seed_everything``, from the environment variable that Lightning documents."""
    return rank_variables.number("PL_GLOBAL_SEED", 0)


def keep_loading(trainer: Any) -> None:
    """Have a loader with worker processes ask its sampler again: by itself it asks only when a batch arrives."""
    from lightning_asgd.core.leases.sampler import load_next  # it loads torch, which the command line does without

    (iterator,) = opened_loaders.of(loader_iterator.of(combined_loader(trainer)))
    for _ in range(getattr(iterator, "_num_workers", 0) * getattr(iterator, "_prefetch_factor", 0)):
        load_next(iterator)


# ---------------------------------------------------------------------- the epoch loop: batches and steps

run_epoch = Name("fit_loop.epoch_loop.run(data_fetcher)", SIGNATURE, MEETING)
end_batch = Name("fit_loop.epoch_loop.on_advance_end(data_fetcher)", SIGNATURE, MEETING)
is_trained = Name("fit_loop.epoch_loop._is_training_done", INSTANCE, MEETING)
validates_now = Name("fit_loop.epoch_loop._should_check_val_fx(data_fetcher)", SIGNATURE, MEETING, changed="2.6.0")
validates_this_epoch = Name("fit_loop.epoch_loop._should_check_val_epoch()", SIGNATURE, MEETING)
skips_validation = Name("fit_loop.epoch_loop._skip_next_val", INSTANCE, MEETING)
validate = Name("fit_loop.epoch_loop.val_loop.run()", SIGNATURE, MEETING)
batch_in_epoch = Name("fit_loop.epoch_loop.batch_progress.current.ready", INSTANCE, STEPS)
batches_begun = Name("fit_loop.epoch_loop.batch_progress.total.ready", INSTANCE, STEPS)
last_batch_flag = Name("fit_loop.epoch_loop.batch_progress.is_last_batch", INSTANCE, LEASES, changed="2.6.0: resuming")
latest_batch = Name("fit_loop.epoch_loop.batch_idx", INSTANCE, LEASES)
latest_batch_ever = Name("fit_loop.epoch_loop.total_batch_idx", INSTANCE, LEASES)
automatic_steps = Name(
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.ready", INSTANCE, STEPS
)
manual_steps = Name("fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.ready", INSTANCE, STEPS)
logged_step = Name("fit_loop.epoch_loop._batches_that_stepped", INSTANCE, STEPS)
before_fetch = Name("fit_loop.epoch_loop._on_before_fetch()", SIGNATURE, STALLS)
after_fetch = Name("fit_loop.epoch_loop._on_after_fetch()", SIGNATURE, STALLS)
broadcast_sigterm = Name("fit_loop.epoch_loop._broadcast_sigterm_tensor()", SIGNATURE, SIGNALS, since="2.5.2")


def count_saved_batches(loops: dict[str, Any], batches: int, begun: int) -> None:
    """The same in a checkpoint, where ``loops`` is the fit loop's state, and ``begun`` counts batches of all epochs."""
    progress = loops["epoch_loop.batch_progress"]
    shift(progress["current"], batches - progress["current"]["ready"])
    shift(progress["total"], begun - progress["total"]["ready"])


# ---------------------------------------------------------------------- methods that Lightning calls

_SCRIPTS, _PROCESSES = script_launcher.path, multi_process_launcher.path
_PASSED = (
    Name(f"{_SCRIPTS}.__init__(cluster_environment, num_processes, num_nodes)", SIGNATURE, STARTING),
    Name(f"{_SCRIPTS}._call_children_scripts()", SIGNATURE, STARTING),
    Name(f"{_PROCESSES}.__init__(strategy, start_method)", SIGNATURE, STARTING),
    Name(f"{_PROCESSES}._wrapping_function(process_idx, trainer)", SIGNATURE, STARTING),
    Name(f"{_PROCESSES}._recover_results_in_main_process(worker_output, trainer)", SIGNATURE, STARTING),
    Name(f"{_PROCESSES}._collect_rank_zero_results(trainer, results)", SIGNATURE, STARTING),
    Name(f"{_PROCESSES}.get_extra_results(trainer)", SIGNATURE, STARTING),
    Name(f"{_PROCESSES}.update_main_process_results(trainer, extra)", SIGNATURE, STARTING),
    Name(f"{_STRATEGY}._configure_launcher()", SIGNATURE, STARTING),
    Name(f"{_STRATEGY}._launcher", INSTANCE, STARTING),
    Name(f"{_STRATEGY}._precision_plugin", INSTANCE, TAKING),
    Name(f"{_STRATEGY}._checkpoint_io", INSTANCE, TAKING),
    Name(f"{_STRATEGY}.lightning_restore_optimizer", INSTANCE, SAVING),
)
NAMES = (*(each for each in list(vars().values()) if isinstance(each, Name)), *_PASSED)
"""All names."""


class ScriptLauncherHooks:
    """The names of Lightning's script launcher, for this package's own."""

    procs: list[Any]

    def start_scripts(self) -> list[Any]:
        """Start the script once for each worker of this machine except the first. Returns the processes."""
        self._call_children_scripts()  # type: ignore[attr-defined]
        return self.procs

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the processes: libraries save a strategy together with a model."""
        return {**self.__dict__, "procs": []}


class ProcessLauncherHooks:
    """The names of Lightning's multi-processing launcher, for this package's own, whose methods are called here."""

    _strategy: Any
    _start_method: str
    processes: list[Any]

    @property
    def procs(self) -> list[Any]:
        """The workers' processes, which Lightning sets."""
        return self.processes

    @procs.setter
    def procs(self, processes: list[Any]) -> None:
        self.processes = processes
        self.watch(processes)  # type: ignore[attr-defined]

    @property
    def strategy(self) -> Any:
        """The strategy whose workers are started."""
        return self._strategy

    @strategy.setter
    def strategy(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def start_method(self) -> str:
        """How the workers are started."""
        return self._start_method

    def _wrapping_function(self, process_idx: int, trainer: Any, *call: Any, **states: Any) -> None:
        run: Any = super()._wrapping_function  # type: ignore[misc]
        self._queue = next(each for each in call if hasattr(each, "put"))  # for the results
        self.run_worker(process_idx, trainer, lambda: run(process_idx, trainer, *call, **states))  # type: ignore[attr-defined]

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        collect: Any = super()._collect_rank_zero_results  # type: ignore[misc]
        return self.collect_results(lambda: collect(trainer, results), self._queue.put)  # type: ignore[attr-defined]

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        super()._recover_results_in_main_process(worker_output, trainer)  # type: ignore[misc]
        self.remove_weights(worker_output.weights_path)  # type: ignore[attr-defined]

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        """The chief's results for the main process."""
        mine = self.send_results(trainer)  # type: ignore[attr-defined]
        return {**super().get_extra_results(trainer), **mine}  # type: ignore[misc]

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        """Take the chief's results, in the main process."""
        super().update_main_process_results(trainer, extra)  # type: ignore[misc]
        self.take_results(trainer, extra)  # type: ignore[attr-defined]


class CommonHooks:
    """The names of Lightning's strategies, for this package's own, whose methods are called here."""

    _launcher: Any

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether a checkpoint holds optimizer states that Lightning is to restore."""
        return bool(super().lightning_restore_optimizer and self._restores_optimizers)  # type: ignore[misc, attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the optimizers: Lightning's wrappers around them cannot be pickled."""
        made = {name.attribute for name in (optimizers, wrapped_optimizers)}
        return {name: [] if name in made else value for name, value in vars(self).items()}

    def make_lightnings_launcher(self) -> Any:
        """Have Lightning's own launcher, if any, and return it."""
        super()._configure_launcher()  # type: ignore[misc]
        return self._launcher

    def _configure_launcher(self) -> None:
        self._launcher = self._make_launcher() or self._launcher  # type: ignore[attr-defined]


class UnattachedHooks:
    """Attributes of a strategy that no Trainer has taken: a Trainer of either tree reads them before it sets them."""

    _given: dict[str, Any]
    _accelerator = property(lambda self: self._given["accelerator"])
    _precision_plugin = property(lambda self: self._given["precision_plugin"])
    _precision = property(lambda self: self._given.get("precision"))  # that of Fabric's
    _checkpoint_io = property(lambda self: self._given["checkpoint_io"])
    cluster_environment = property(lambda self: self._given["cluster_environment"])
    parallel_devices = property(lambda self: self._given["parallel_devices"])


__all__ = [name for name, value in list(vars().items()) if getattr(value, "__module__", "") == __name__]
