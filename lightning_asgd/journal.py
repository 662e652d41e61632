"""The file beside a run's logs that ``lightning-asgd report`` reads: figures of all workers, a line of JSON each time.

Lines are only ever added. Every fit begins with one that says what it is, so that the fits of a run that was resumed
follow each other in one file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_asgd.errors import ConfigurationError
from lightning_asgd.messages import Figures

__all__ = ["FILE", "Entry", "Fit", "Journal", "find", "read"]

FILE = "asgd.jsonl"
_FIELDS = {f.name for f in fields(Figures)}


@dataclass(frozen=True)
class Entry:
    """What worker 0 knew at one moment.

    Attributes:
        at_s: seconds since the fit began.
        step: the Trainer's global step.
        living: workers that took part.
        figures: the latest of each worker, gone ones included.
    """

    at_s: float
    step: int
    living: tuple[int, ...]
    figures: dict[int, Figures]


@dataclass
class Fit:
    """One fit.

    Attributes:
        started: local date and time, as text.
        workers: their number.
        settings: arguments of the strategy.
        entries: in the order of time.
        end: how it ended; empty if nobody knows.
    """

    started: str
    workers: int
    settings: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    end: str = ""

    @property
    def last(self) -> dict[int, Figures]:
        """The final figures of every worker that ever was."""
        return self.entries[-1].figures if self.entries else {}


class Journal:
    """Writes the file.

    Args:
        folder: made if it is not there.
        workers: number of workers.
        settings: arguments of the strategy, plain values.
    """

    def __init__(self, folder: Path, workers: int, settings: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        self._write("fit", started=time.strftime("%Y-%m-%d %H:%M:%S"), workers=workers, settings=dict(settings))

    def add(self, entry: Entry) -> None:
        """Note the figures of a moment."""
        self._write("figures", **asdict(entry))

    def end(self, how: str) -> None:
        """Note how the fit ended."""
        self._write("end", how=how)

    def _write(self, kind: str, **about: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, **about}, separators=(",", ":")) + "\n")


def find(folder: Path) -> Path:
    """The file of a run.

    Args:
        folder: the run's, or one above it; or the file itself.

    Raises:
        ConfigurationError: there is none, or more than one.
    """
    if folder.is_file():
        return folder
    if (folder / FILE).is_file():
        return folder / FILE
    found = sorted(folder.rglob(FILE)) if folder.is_dir() else []
    if len(found) == 1:
        return found[0]
    if not found:
        what = "holds no" if folder.is_dir() else "does not exist: no"
        raise ConfigurationError(
            f"{str(folder)!r} {what} {FILE}. Expected the folder of a run's logs, such as lightning_logs/version_0, "
            "of a Trainer with ASGDStrategy and a logger; monitor=False writes none."
        )
    names = ", ".join(str(path.parent) for path in found[:10]) + (", ..." if len(found) > 10 else "")
    raise ConfigurationError(f"{str(folder)!r} holds the logs of {len(found)} runs. Expected one of {names}.")


def read(path: Path) -> list[Fit]:
    """The fits of a file, in the order in which they began; those without any figures are left out.

    Raises:
        ConfigurationError: a line is none that :class:`Journal` writes; or there are no figures.
    """
    fits: list[Fit] = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            _take(json.loads(line), fits)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            if number == len(lines):  # it was being written when the job was killed
                break
            raise ConfigurationError(
                f"Line {number} of {str(path)!r} cannot be read ({error!r}). Expected a file that an ASGDMonitor wrote."
            ) from error
    fits = [fit for fit in fits if fit.entries]
    if not fits:
        raise ConfigurationError(f"{str(path)!r} holds no figures. Expected a fit of at least one batch.")
    return fits


def _take(line: dict[str, Any], fits: list[Fit]) -> None:
    kind = line["kind"]
    if kind == "fit":
        fits.append(Fit(line["started"], line["workers"], line["settings"]))
    elif kind == "figures":
        figures = {int(worker): _figures(values) for worker, values in line["figures"].items()}
        fits[-1].entries.append(Entry(line["at_s"], line["step"], tuple(line["living"]), figures))
    elif kind == "end":
        fits[-1].end = line["how"]


def _figures(values: dict[str, Any]) -> Figures:
    known = {name: value for name, value in values.items() if name in _FIELDS}  # a newer version may write more
    known["staleness"] = {int(start): count for start, count in known.get("staleness", {}).items()}
    return Figures(**known)
