"""``ASGDMonitor``: metrics of all workers in the Trainer's loggers, on worker 0. See docs/monitoring.md."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.class_trees import CallbackExtension, Extension, rank_zero_warn, tree_of
from lightning_asgd.core.lightning.private_names import Name, is_a, logged_step, tensorboard, wandb_logger
from lightning_asgd.monitor.meter import Meter
from lightning_asgd.monitor.metric_definitions import Window, Windows, bars, measures, staleness
from lightning_asgd.monitor.metric_log import Entry, MetricLog
from lightning_asgd.programs.batch_units import samples_in

_READ_S = 1.0  # at least, between two readings of a worker's metrics
_OF_EACH = ("samples_per_s", "wait/share")  # what is logged of each worker without ``detail="all"``


class ASGDMonitor(CallbackExtension, Extension):  # type: ignore[misc]
    """Logs what the workers of a fit do: staleness, exchanges, waiting, throughput, and who is alive.

    A Trainer with a logger and an :class:`~lightning_asgd.ASGDStrategy` gets one by itself. Everything goes to the
    Trainer's loggers under ``asgd/...``, at most every few seconds and at sync points; docs/monitoring.md lists it.
    Worker 0 also writes all of it to ``asgd.jsonl`` beside the logs, for ``lightning-asgd report``. The other workers'
    figures are those of their latest heartbeat. Extends Lightning's ``Callback``.

    Args:
        every_n_seconds: seconds between two times of logging, sync points excepted.
        detail: ``"summary"``: the loggers get every metric of all workers together, and of each worker its samples per
            second and the share of its time that it waited. ``"all"``: they get every metric of each worker.

    Raises:
        ConfigurationError: ``every_n_seconds`` is not a number above 0, or ``detail`` is another word.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> from lightning_asgd import ASGDStrategy
        >>> trainer = Trainer(strategy=ASGDStrategy(), callbacks=[ASGDMonitor(every_n_seconds=30)], accelerator="cpu")
    """

    def __init__(self, every_n_seconds: float = 5.0, detail: Literal["summary", "all"] = "summary") -> None:
        if not isinstance(every_n_seconds, (int, float)) or isinstance(every_n_seconds, bool) or every_n_seconds <= 0:
            raise ConfigurationError(
                f"ASGDMonitor(every_n_seconds={every_n_seconds!r}). Expected a number of seconds above 0."
            )
        if detail not in ("summary", "all"):
            raise ConfigurationError(f"ASGDMonitor(detail={detail!r}). Expected 'summary' or 'all'.")
        self.every_n_seconds, self.detail = every_n_seconds, detail
        self._read_s = min(_READ_S, every_n_seconds)
        self._meter: Meter | None = None
        self._journal: MetricLog | None = None
        self._windows = Windows(every_n_seconds)
        self._begun = self._read_at = self._log_at = 0.0  # on the meter's clock
        self._metrics: dict[str, Any] = {}  # of the Trainer, when the latest validation began
        self._epoch = self._batch = 0  # the present ones
        self._logged = (-1, -1)  # samples and pushes of worker 0 when it logged last
        self._logs = False  # whether it has begun to

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, without the running fit's meter and log."""
        return {**self.__dict__, "_meter": None, "_journal": None}

    # ------------------------------------------------------------------ counting, on every worker

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start measuring."""
        self._meter = self._journal = None
        self._logs = False
        if not hasattr(trainer.strategy, "fit_session"):
            rank_zero_warn(f"ASGDMonitor has nothing to log under {type(trainer.strategy).__name__}.")
            return
        self._meter = trainer.strategy.fit_session.measure(lambda: self._epoch + _fraction(trainer, self._batch))
        self._windows, self._logged = Windows(self.every_n_seconds), (-1, -1)
        self._begun = begun = self._meter.resume()
        self._read_at, self._log_at = begun + self._read_s, begun + self.every_n_seconds
        if trainer.is_global_zero:
            self._begin(trainer)

    def _begin(self, trainer: Any) -> None:
        """Start logging: when training begins and, in an elastic run, when this worker becomes the chief."""
        self._logs = True
        settings = trainer.strategy.settings
        if (folder := log_folder(trainer)) is not None:
            self._journal = MetricLog(folder, trainer.world_size, settings, _about(trainer))
        for logger in _loggers(trainer, wandb_logger):
            config = {"asgd": {**settings, "workers": trainer.world_size}}
            logger.experiment.config.update(config, allow_val_change=True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Batches come next."""
        self._epoch, self._batch = trainer.current_epoch, 0
        if self._meter is not None:
            self._meter.resume()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        if self._meter is not None:
            self._meter.begin_batch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the batch; from time to time report metrics, and log those of all workers."""
        if self._meter is None:
            return
        self._batch = batch_idx + 1
        now = self._meter.end_batch(samples_in(batch), _loss(outputs, trainer.accumulate_grad_batches))
        if now < self._read_at:
            return
        self._read_at = now + self._read_s
        trainer.strategy.fit_session.report_metrics()
        if trainer.is_global_zero and now >= self._log_at:
            self._log_at = now + self.every_n_seconds
            self._meter.pause()
            _show(pl_module, self._log(trainer, logged_step(trainer)))
            self._meter.resume()

    # ------------------------------------------------------------------ sync points: the strategy has taken figures

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Log: all workers have reported their metrics."""
        self._pause(trainer, over=False)
        if self._journal is not None:
            self._metrics = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the metrics that the validation has set. Batches come next."""
        if self._meter is None:
            return
        at_s = self._meter.resume() - self._begun
        if self._journal is not None:
            known = trainer.callback_metrics.items()  # those of training are still the same objects
            new = {name: value for name, value in known if value is not self._metrics.get(name)}
            self._journal.validation(at_s, {name: float(value) for name, value in new.items() if _is_number(value)})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log: all workers have reported their metrics."""
        self._pause(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log for the last time, with a summary of the fit."""
        self._pause(trainer)
        if self._meter is not None and trainer.is_global_zero:
            self._log_fit(trainer)
            self._write_events(trainer.strategy.board)
        self._end("done")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Note it."""
        self._end(f"{type(exception).__name__}: {exception}")

    def _pause(self, trainer: Any, *, over: bool = True) -> None:
        if self._meter is not None:
            self._meter.pause()
            if trainer.is_global_zero:
                # Lightning too logs what belongs to an epoch's end with the step of the last batch.
                self._log(trainer, logged_step(trainer) - over)

    # ------------------------------------------------------------------ logging, on worker 0

    def _log(self, trainer: Any, step: int) -> dict[str, float]:
        """Log the metrics that are new, with a step. Returns those of all workers together."""
        board = trainer.strategy.board
        figures, living = board.figures, board.living
        mine = board.mine
        if mine is None or (mine.samples, mine.pushes) == self._logged:
            return {}
        self._logged = mine.samples, mine.pushes
        if not self._logs:
            self._begin(trainer)
        self._windows.update(figures)
        windows = self._windows.of(living)
        together = {**measures(list(windows.values())), "workers/alive": float(len(living))}
        metrics = {f"asgd/{name}": value for name, value in together.items()}
        for worker, window in windows.items():
            of_each = measures([window])
            names = [name for name in of_each if self.detail == "all" or name in _OF_EACH]
            metrics |= {f"asgd/worker{worker}/{name}": of_each[name] for name in names}
        counts, edges = bars(staleness(figures.values()))
        for logger in trainer.loggers:
            logger.log_metrics({**metrics, **_histogram(logger, counts, edges)}, step=step)
        for logger in _loggers(trainer, tensorboard):
            _add_histogram(logger.experiment, counts, edges, step)
        if self._journal is not None:
            self._journal.add(Entry(mine.at_s, step, living, figures))
            self._write_events(trainer.strategy.board)
        return together

    def _write_events(self, board: Any) -> None:
        """Write what has happened to workers and servers since the last time."""
        mine, now = board.mine, time.monotonic()
        while self._journal is not None and mine is not None and board.events:
            at, text = board.events.popleft()
            self._journal.event(max(0.0, mine.at_s - (now - at)), text)

    def _log_fit(self, trainer: Any) -> None:
        """Log the whole fit to Weights & Biases: its summary, and a table of the workers."""
        figures = trainer.strategy.board.figures
        for logger in _loggers(trainer, wandb_logger):
            whole = measures([Window(each) for each in figures.values()])
            logger.experiment.summary.update({f"asgd/fit/{name}": value for name, value in whole.items()})
            rows = {worker: measures([Window(each)]) for worker, each in figures.items()}
            columns = list(whole)
            data = [[worker, *(row.get(name) for name in columns)] for worker, row in rows.items()]
            logger.log_table("asgd/workers", ["worker", *columns], data, step=logged_step(trainer))

    def _end(self, how: str) -> None:
        journal, self._journal, self._meter = self._journal, None, None
        if journal is not None:
            journal.end(how)


def _is_number(value: Any) -> bool:
    """Whether a metric is one: callbacks may put anything there."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def _about(trainer: Any) -> dict[str, Any]:
    """What is trained, where and by which versions."""
    module, tree = trainer.lightning_module, tree_of(trainer)
    numbers = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return {
        "model": type(module).__name__,
        "parameters": sum(number for number, _ in numbers),
        "trainable": sum(number for number, trained in numbers if trained),
        "precision": str(trainer.precision),
        "places": trainer.strategy.board.places,
        "versions": {
            "lightning-asgd": str(sys.modules["lightning_asgd"].__version__),
            tree.distribution: tree.version,
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
        },
    }


def _show(pl_module: Any, metrics: dict[str, float]) -> None:
    """Show the most important metrics in the progress bar."""
    for name in ("staleness/mean", "workers/alive"):
        if name in metrics:
            about = {"prog_bar": True, "logger": False, "rank_zero_only": True}
            pl_module.log(f"asgd/{name.partition('/')[0]}", metrics[name], **about)


def log_folder(trainer: Any) -> str | None:
    """Where the run's logs are; where its logger has no folder, the one that Lightning puts checkpoints into.

    Path or URL.
    """
    if trainer.fast_dev_run:
        return None
    if not trainer.loggers:
        return str(trainer.default_root_dir)
    logger = trainer.loggers[0]
    given = [
        str(each) if isinstance(each, (str, Path)) else "" for each in (logger.log_dir, logger.save_dir)
    ]  # or mocks
    version = f"version_{logger.version}" if isinstance(logger.version, int) else logger.version
    names = [name for name in (logger.name, version) if isinstance(name, str)]
    return given[0] or os.path.join(given[1] or str(trainer.default_root_dir), *names)


def _fraction(trainer: Any, batch: int) -> float:
    """Part of the epoch that is trained. Where workers share the data, its batches are what this worker expects."""
    batches = trainer.num_training_batches
    return min(1.0, batch / batches) if batches else 0.0


def _loss(outputs: Any, accumulated: int) -> Tensor | None:
    """Training loss of a batch; Lightning has divided it by the batches that a step accumulates."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    if loss.requires_grad:
        loss = loss.detach()
    return loss if accumulated == 1 else loss * accumulated


def _loggers(trainer: Any, kind: Name) -> list[Any]:
    """The Trainer's loggers of a class, of either tree."""
    return [logger for logger in trainer.loggers if is_a(logger, kind)]


def _histogram(logger: Any, counts: list[int], edges: list[int]) -> dict[str, Any]:
    """The histogram of staleness in the form of Weights & Biases; nothing for other loggers."""
    if not is_a(logger, wandb_logger):
        return {}
    import wandb

    return {"asgd/staleness/histogram": wandb.Histogram(np_histogram=(counts, edges))}


def _add_histogram(writer: Any, counts: list[int], edges: list[int], step: int) -> None:
    """The same for TensorBoard."""
    sums = [sum(count * edge**power for count, edge in zip(counts, edges, strict=False)) for power in (0, 1, 2)]
    if sums[0]:
        about = {"num": sums[0], "sum": sums[1], "sum_squares": sums[2], "min": 0, "max": edges[-1]}
        writer.add_histogram_raw(
            "asgd/staleness/histogram", bucket_limits=edges[1:], bucket_counts=counts, global_step=step, **about
        )
