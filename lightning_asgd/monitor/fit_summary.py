"""The lines at the end of a fit, which fit a terminal of 80 columns. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.core.protocol import WorkerMetrics
from lightning_asgd.monitor.metric_definitions import Window, measures

_ROOM = 78  # columns of a terminal, without the indent
_EACH = 8  # workers whose rates are listed; of more, the slowest and the fastest
_NAMED = 3  # lines for lost workers


@dataclass(frozen=True)
class FitSummary:
    """The lines at the end of a fit."""

    workers: int
    seconds: float  # for which the chief has trained
    figures: Mapping[int, WorkerMetrics]  # every worker's metrics; empty without a monitor
    stats: ExchangeStats  # of the chief's exchanges
    chief: int
    waited_s: float  # by the chief
    folder: str | None  # where the metrics were written; None without a monitor

    def __str__(self) -> str:
        workers = max(self.workers, len(self.figures))
        lines = [f"A-SGD: {count(workers, 'worker')} trained for {duration(self.seconds)}."]
        lines += [*self._rates(), *(self._shares() if self.figures else self._of_chief()), *self._losses()]
        if self.folder is not None:
            lines.append(f"Report: lightning-asgd report {shlex.quote(self.folder)}")
        return "\n  ".join(lines)

    def _rates(self) -> list[str]:
        """Samples or tokens per second: of all together in the wall time, and of each in its own."""
        figures = self.figures
        what = "tokens" if any(each.tokens for each in figures.values()) else "samples"
        wall = max([self.seconds, *(each.at_s for each in figures.values())])
        rates = {worker: Window(each).per_s(what) for worker, each in figures.items()}
        if not any(rates.values()):
            return []
        together = f"{_number(sum(getattr(each, what) for each in figures.values()) / wall)} {what}/s"
        if len(rates) == 1:
            return [f"Speed: {together}."]
        listed = f"{together} together. By worker: {', '.join(map(_number, rates.values()))}."
        if len(rates) <= _EACH and len(listed) <= _ROOM:
            return [listed]
        least, most = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
        slow, fast = f"{_number(rates[least])} (worker {least})", f"{_number(rates[most])} (worker {most})"
        return [f"{together} together. By worker: {slow} to {fast}."]

    def _shares(self) -> list[str]:
        """How stale the workers' pushes were, and how much of their time they waited."""
        known = measures([Window(each) for each in self.figures.values()])
        said = []
        if "staleness/mean" in known:
            said.append(f"Staleness: {known['staleness/mean']:.1f} on average, {known['staleness/max']:.0f} at most.")
        if "wait/share" in known:  # of which the report's page shows these two
            waiting, between = known["wait/exchange"] + known["wait/sync"], known["wait/data"]
            said.append(f"Waiting: {waiting:.1%}, between batches: {between:.1%}.")
        return [" ".join(said)] if said else []

    def _of_chief(self) -> list[str]:
        """The same of the chief alone."""
        stats = self.stats
        stale = f"staleness {stats.staleness_mean:.1f} on average, {stats.staleness_max} at most; " * (stats.pushes > 0)
        return [f"Worker {self.chief}: {stale}waited for {duration(self.waited_s)}."]

    def _losses(self) -> list[str]:
        """Which workers and servers were lost."""
        lost, replaced = self.stats.lost_workers, self.stats.servers_replaced
        servers = f"{count(replaced, 'lost server')} {'was' if replaced == 1 else 'were'} replaced."
        lines = [servers] if replaced else []
        if not lost:
            return lines
        named = sorted(lost)[: _NAMED if len(lost) <= _NAMED else _NAMED - 1]
        others = sorted(lost)[len(named) :]
        lines.append(f"{len(lost)} of {self.workers} workers were lost during this fit:")
        lines += [_cut(f"worker {worker}: {lost[worker]}") for worker in named]
        if others:
            lines.append(_cut(f"{len(others)} others, in trainer.strategy.stats.lost_workers: {str(others)[1:-1]}"))
        return lines


def _cut(text: str) -> str:
    """The first line of a text, as far as there is room."""
    line = text.partition("\n")[0]
    return line if len(line) <= _ROOM else f"{line[: _ROOM - 1]}…"


def count(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Seconds, or hours, minutes and seconds from a minute on."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min {rest} s" if minutes >= 60 else f"{minutes} min {rest} s"
