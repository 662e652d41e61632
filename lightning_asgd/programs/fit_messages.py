"""What is logged when a fit starts and when it ends: on the chief, and where Lightning logs what it has to say."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lightning_asgd.algorithms import ASGD, SparseLoCo
from lightning_asgd.core.algorithms.config import ExchangeConfig
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.lightning.class_trees import tree_of
from lightning_asgd.core.lightning.private_names import rich_bar
from lightning_asgd.core.lightning.sync_callback import is_monitored
from lightning_asgd.core.worker.fleet import Fleet
from lightning_asgd.monitor.callback import log_folder
from lightning_asgd.monitor.fit_summary import FitSummary, count

log = logging.getLogger(__name__)

ALONE = "A-SGD: only one worker. To add workers: Trainer(devices=2), num_nodes=2, or a run of `lightning-asgd serve`."
FIRST = "A-SGD: no other worker has joined the run yet. Start the script again, here or on another machine."
_ADAPTIVE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adafactor", "Muon", "Lion")
_MANY = 8  # workers from which Adam learns more slowly than under DDP: `make sets`
_SELDOM = 5  # steps between two exchanges from which that many workers learn more slowly with SGD


class FitMessages:
    """The messages of one fit of one worker; ``waited`` gives the seconds that it has waited so far."""

    def __init__(
        self, trainer: Any, membership: Fleet, config: ExchangeConfig, waited: Callable[[], Iterable[float]]
    ) -> None:
        self._trainer = trainer
        self._membership = membership
        self._config = config
        self._waited = waited
        self._began = self._waited_before = 0.0

    def start(self, data: str, period: int = 0) -> None:
        """Say how training begins: how workers divide the ``data``, and the ``period`` if it follows from the fit."""
        trainer, membership, begun = self._trainer, self._membership, self._began
        if begun:
            return
        self._began, self._waited_before = time.monotonic(), sum(self._waited())
        if not trainer.is_global_zero:
            return
        workers, servers = membership.rank_and_size[1], membership.client.connection.transport.num_servers
        what = [exchanges(self._config, period), *([data] if workers > 1 else [])]
        with _aside(trainer.progress_bar_callback):
            tree = tree_of(trainer)
            tree.say(start_line(workers, servers, membership.transport, what, self._folder))
            if workers == 1:
                tree.say(FIRST if membership.others_may_join else ALONE)
            if (advice := rate_advice(workers, self._config, trainer.optimizers)) is not None:
                tree.say(advice)

    def end(self, stats: ExchangeStats) -> None:
        """Sum up the fit."""
        trainer, membership = self._trainer, self._membership
        if not trainer.is_global_zero:
            return
        summary = FitSummary(
            membership.rank_and_size[1],
            time.monotonic() - self._began,
            membership.board.figures,
            stats,
            membership.rank,
            sum(self._waited()) - self._waited_before,
            self._folder if is_monitored(trainer) else None,
        )
        with _aside(trainer.progress_bar_callback, over=True):
            if stats.lost_workers or stats.servers_replaced:  # whatever Lightning is allowed to say
                log.warning("%s", summary)
            else:
                tree_of(trainer).say(str(summary))

    @property
    def _folder(self) -> str | None:
        """Where the logs go, relative to the current folder if they are below it; None if there are none."""
        logs = self._trainer.loggers or is_monitored(self._trainer)
        folder = log_folder(self._trainer) if logs else None
        return None if folder is None else folder.removeprefix(os.path.join(os.getcwd(), ""))


@contextlib.contextmanager
def _aside(bar: Any, *, over: bool = False) -> Iterator[None]:
    """Remove rich's display from the terminal while lines are logged, or permanently if training is ``over``."""
    # The display overwrites lines that it has not printed itself, such as those of Lightning's loggers.
    progress = rich_bar.of(bar)
    shown = progress is not None and progress.live.is_started
    if shown:
        progress.stop()
    yield
    if shown and not over:
        progress.start()


def exchanges(config: ExchangeConfig, given: int = 0) -> str:
    """When workers exchange, and by which algorithm if it is not the default; ``given`` follows from the fit."""
    period = f"nsync={'auto' if config.auto else given or config.nfetch}"
    if config.nfetch != config.npush:
        period = f"nfetch={config.nfetch}, npush={config.npush}"
    return period if config.algorithm_name == "ASGD" else f"{period}, {config.algorithm_name}"


def rate_advice(workers: int, config: ExchangeConfig, optimizers: Iterable[Any]) -> str | None:
    """What to do where workers learn more slowly than DDP with the same settings, or move the weights too far."""
    algorithm = config.algorithm
    kinds = [next((base.__name__ for base in type(o).__mro__ if base.__name__ in _ADAPTIVE), "") for o in optimizers]
    names = [name for name in kinds if name]
    plain = any(isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers)
    if isinstance(algorithm, SparseLoCo) and algorithm.lr is None and workers > 1 and plain and not names:
        return (
            f"A-SGD: SparseLoCo's outer rate, sqrt({workers}) = {math.sqrt(workers):.1f} for {workers} workers, is "
            "meant for adaptive optimizers such as AdamW. After SGD with momentum it is too large: SparseLoCo(lr=1.0)."
        )
    if workers < _MANY or not isinstance(algorithm, ASGD) or algorithm.scale != "mean":
        return None
    if names and not config.gain:
        root = math.sqrt(workers)
        return (
            f"A-SGD: {workers} workers with {names[0]} learn more slowly than DDP at the same learning rate: each "
            f"takes smaller steps along its own noisier gradients. About sqrt({workers}) = {root:.1f} times the rate "
            "makes up for it."
        )
    if config.auto or config.nfetch < _SELDOM:
        return None
    return (
        f"A-SGD: {workers} workers that exchange every {config.nfetch} steps may learn more slowly than DDP. Of images "
        "8 workers recognised 1 % fewer and 16 workers 2.5 % fewer. Use a smaller nsync, such as 2."
    )


def start_line(workers: int, servers: int, transport: str, what: list[str], folder: str | None) -> str:
    """The lines at the start of a fit."""
    logs = "" if folder is None else f", logs in {folder}"
    parties = f"A-SGD: {count(workers, 'worker')}, {count(servers, 'server')}, transport {transport}."
    return f"{parties}\n  {', '.join(what)}{logs}."
