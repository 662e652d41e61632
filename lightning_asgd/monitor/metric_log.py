"""The metrics file in a run's log folder, which ``lightning-asgd report`` reads: one line of JSON each time.

Lines are only ever added. Every fit begins with a line that describes it, so the fits of a resumed run follow each
other in one file. If logs go to a URL, such as ``s3://bucket/logs``, the file goes there too. Object stores cannot add
to a file, so it is written as a whole: at most once a minute, and when the fit ends.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.protocol import WorkerMetrics

log = logging.getLogger(__name__)

FILE = "asgd.jsonl"
_UPLOAD_S = 60.0  # between two uploads, at least
_SHARE = 20  # uploads take at most a twentieth of the time
_FIELDS = {f.name for f in fields(WorkerMetrics)}


@dataclass(frozen=True)
class Entry:
    """What worker 0 knew at one moment."""

    at_s: float  # seconds since the fit began
    step: int  # the Trainer's global step
    living: tuple[int, ...]  # workers that took part
    figures: dict[int, WorkerMetrics]  # the latest metrics of each worker, including workers that are gone


@dataclass
class Fit:
    """One fit. Times of events and validations are seconds since it began."""

    started: str  # local date and time
    workers: int
    settings: dict[str, Any]  # arguments of the strategy
    entries: list[Entry] = field(default_factory=list)  # in the order of time
    end: str = ""  # how it ended; empty if unknown
    events: list[tuple[float, str]] = field(default_factory=list)  # of workers and servers
    about: dict[str, Any] = field(default_factory=dict)  # what is trained, where and by which versions
    validations: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # on the chief

    @property
    def last(self) -> dict[int, WorkerMetrics]:
        """The final metrics of every worker that ever took part."""
        return self.entries[-1].figures if self.entries else {}


class MetricLog:
    """Writes the file, in a ``folder`` (path or URL) that is made if it is not there."""

    def __init__(
        self, folder: str | Path, workers: int, settings: Mapping[str, Any], about: Mapping[str, Any] | None = None
    ) -> None:
        self._file: _Local | _Remote = _Remote(str(folder)) if _is_url(folder) else _Local(_local(folder))
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._write("fit", started=started, workers=workers, settings=dict(settings), about=dict(about or {}))

    @property
    def path(self) -> Path:
        """The file; its path within the file system where that is not this machine's."""
        return self._file.path

    def add(self, entry: Entry) -> None:
        """Write the metrics of this moment."""
        self._write("figures", **asdict(entry))

    def event(self, at_s: float, text: str) -> None:
        """Write what has happened to a worker or server."""
        self._write("event", at_s=round(at_s, 3), text=text)

    def validation(self, at_s: float, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a validation."""
        self._write("validation", at_s=round(at_s, 3), metrics=dict(metrics))

    def end(self, how: str) -> None:
        """Note how the fit ended."""
        self._write("end", how=how)
        self._file.close()

    def _write(self, kind: str, **about: Any) -> None:
        self._file.add(json.dumps({"kind": kind, **about}, separators=(",", ":")) + "\n")


class _File:
    """A file of metrics. If it cannot be written, one warning says so and training continues."""

    _broken = False

    def _give_up(self, place: object, error: Exception) -> None:
        self._broken = True
        log.warning(
            "The workers' metrics cannot be written to %s (%s: %s). Training continues, but `lightning-asgd report` "
            "will not show what follows. Check the space and the access, or log to another folder.",
            place,
            type(error).__name__,
            error,
        )


class _Local(_File):
    """A file of this machine."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):  # its writer was killed
                self.add("\n")
        except OSError as error:
            self._give_up(self.path, error)

    def add(self, line: str) -> None:
        if self._broken:
            return
        try:
            with self.path.open("a") as file:
                file.write(line)
        except OSError as error:
            self._give_up(self.path, error)

    def close(self) -> None:
        """Every line is written already."""


class _Remote(_File):
    """A file at a URL."""

    def __init__(self, folder: str) -> None:
        self.url = os.path.join(folder, FILE)
        self.path = Path(FILE)
        self._lines: list[str] = []
        self._upload_at = 0.0
        try:
            self._fs, path = _file_system(self.url)
            self.path = Path(path)
            self._fs.makedirs(str(self.path.parent), exist_ok=True)
            if self._fs.exists(path):
                self._lines.append(self._fs.cat_file(path).decode())
        except Exception as error:
            self._give_up(self.url, error)

    def add(self, line: str) -> None:
        self._lines.append(line)
        if time.monotonic() >= self._upload_at:
            self.close()

    def close(self) -> None:
        """Upload all lines."""
        if self._broken:
            return
        begun = time.monotonic()
        try:
            self._fs.pipe_file(str(self.path), "".join(self._lines).encode())
        except Exception as error:  # each file system has its own kinds
            self._give_up(self.url, error)
        now = time.monotonic()
        self._upload_at = now + max(_UPLOAD_S, _SHARE * (now - begun))


def _is_url(place: str | Path) -> bool:
    """Whether a place is not on this machine."""
    import fsspec.utils  # with Lightning

    return fsspec.utils.get_protocol(str(place)) not in ("file", "local")


def _local(place: str | Path) -> Path:
    """The path of a place on this machine, which may be given as ``file://``."""
    return Path(_file_system(str(place))[1])


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    import fsspec.core

    found: tuple[Any, str] = fsspec.core.url_to_fs(url)
    return found


def find_log(folder: str | Path) -> str | Path:
    """The file of a run.

    Args:
        folder: the run's, or one above it; or the file itself. Path or URL.

    Raises:
        ConfigurationError: there is none, or more than one.
    """
    is_folder, found = _search_url(str(folder)) if _is_url(folder) else _search(_local(folder))
    if len(found) == 1:
        return found[0]
    if not found:
        what = "holds no" if is_folder else "does not exist: no"
        raise ConfigurationError(
            f"{str(folder)!r} {what} {FILE}. Expected the folder of a run's logs, such as lightning_logs/version_0, "
            "of a Trainer with ASGDStrategy and a logger; monitor=False writes none."
        )
    folders = [str(file).removesuffix(f"/{FILE}") for file in found]
    names = ", ".join(folders[:10]) + (", ..." if len(folders) > 10 else "")
    raise ConfigurationError(f"{str(folder)!r} holds the logs of {len(found)} runs. Expected one of {names}.")


def _search(folder: Path) -> tuple[bool, Sequence[str | Path]]:
    if folder.is_file():
        return False, [folder]
    if (folder / FILE).is_file():
        return True, [folder / FILE]
    return folder.is_dir(), sorted(folder.rglob(FILE)) if folder.is_dir() else []


def _search_url(url: str) -> tuple[bool, Sequence[str | Path]]:
    try:
        fs, path = _file_system(url)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"{url!r} cannot be read ({error}). Expected a folder, or a URL that fsspec knows. Install the package of "
            "its file system, such as s3fs."
        ) from error
    if fs.isfile(path):
        return False, [url]
    if fs.isfile(f"{path}/{FILE}"):
        return True, [os.path.join(url, FILE)]
    is_folder = fs.isdir(path)
    files = fs.find(path) if is_folder else []
    return is_folder, sorted(fs.unstrip_protocol(file) for file in files if file.endswith(f"/{FILE}"))


def read(path: str | Path) -> list[Fit]:
    """The fits of a file, in the order in which they began; fits without metrics are left out.

    Raises:
        ConfigurationError: a line was not written by :class:`MetricLog`; or there are no metrics.
    """
    fits: list[Fit] = []
    lines = _text(path).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            _take(json.loads(line), fits)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            if number == len(lines) or '"kind":"fit"' in lines[number][:16]:  # its writer was killed
                continue
            raise ConfigurationError(
                f"Line {number} of {str(path)!r} cannot be read ({error!r}). Expected a file that an ASGDMonitor wrote."
            ) from error
    fits = [fit for fit in fits if fit.entries]
    if not fits:
        raise ConfigurationError(f"{str(path)!r} holds no metrics. Expected a fit of at least one batch.")
    return fits


def _text(file: str | Path) -> str:
    try:
        if not _is_url(file):
            return _local(file).read_text()
        fs, path = _file_system(str(file))
        return str(fs.cat_file(path).decode())
    except Exception as error:  # each file system has its own kinds
        raise ConfigurationError(
            f"{str(file)!r} cannot be read ({type(error).__name__}: {error}). Expected a file that an ASGDMonitor "
            "wrote, and that you may read."
        ) from error


def _take(line: dict[str, Any], fits: list[Fit]) -> None:
    kind = line["kind"]
    if kind == "fit":
        fits.append(Fit(line["started"], line["workers"], line["settings"], about=line.get("about", {})))
    elif kind == "figures":
        figures = {int(worker): _figures(values) for worker, values in line["figures"].items()}
        fits[-1].entries.append(Entry(line["at_s"], line["step"], tuple(line["living"]), figures))
    elif kind == "event":
        fits[-1].events.append((float(line["at_s"]), str(line["text"])))
    elif kind == "validation":
        metrics = {str(name): float(value) for name, value in line["metrics"].items()}
        fits[-1].validations.append((float(line["at_s"]), metrics))
    elif kind == "end":
        fits[-1].end = line["how"]


def _figures(values: dict[str, Any]) -> WorkerMetrics:
    known = {name: value for name, value in values.items() if name in _FIELDS}  # a newer version may write more
    known["staleness"] = {int(start): count for start, count in known.get("staleness", {}).items()}
    return WorkerMetrics(**known)
