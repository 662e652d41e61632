"""``lightning-asgd report --bundle``: a run's logs in one file for a bug report, without secrets."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatch
from pathlib import Path

from lightning_asgd.cli.console_tables import in_bytes
from lightning_asgd.cli.machine_checks import PRIVATE, number_of_machines
from lightning_asgd.core.foundation.errors import ConfigurationError

_PACKED = ("*.jsonl", "metrics.csv", "hparams.yaml", "config.yaml", "*.log", "*.out", "*.err", "*.txt", "report.html")
_LOGS = ("*.log", "*.out", "*.err", "*.txt")
_LARGEST, _ALL = 16_000_000, 100_000_000  # bytes of a file, and of all files
_CONTINUED = 60  # lines: of a long traceback
_BEGINNING = 80  # characters of a line in which its time stands
_CLOSING = """Secrets, e-mail addresses and home folders were replaced as far as they could be
recognised. Host names and addresses are in the file: read it before you publish it."""

# What precedes a secret, and what secrets look like. No expression takes longer than the text is long.
_NAME = (
    r"(?:secret|token|passw(?:or)?d|passphrase|pwd|(?:api|access|private)[-_]?key|credentials?)"
    r"(?:[-_](?:key|base|value|file)){0,2}"
)
_NAMED = rf"(?i)({_NAME}(?:\\?[\"'])?[ \t]*[:=][ \t]*"
_SECRETS = (
    (rf"(?im)^([ \t]*(?:[A-Za-z0-9]+[-_]){{0,4}}{_NAME}:[ \t]+)(?![\"'])\S[^\n]*", r"\1<redacted>"),
    (rf"(?i)(--(?:[A-Za-z0-9]+[-_]){{0,4}}{_NAME}[\"']?,?[ \t]+\\?[\"']?)(?![-\"'])[^\s\"']+", r"\1<redacted>"),
    (r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,40}-----)?", "<redacted>"),
    (_NAMED + r"\\?([\"']))(?:(?!\\?\2)[^\n])+", r"\1<redacted>"),
    (_NAMED + r")[^\s\"'\\;}<]+", r"\1<redacted>"),
    (r"(?i)\b(bearer|basic) +[\w.~+/=-]{8,}", r"\1 <redacted>"),
    (r"(://)[^\s/@:]{0,64}:[^\s/@]{1,256}@", r"\1<redacted>@"),
    (r"\b(?:hf_|gh[a-z]_|sk-|AKIA|xox[a-z]-|eyJ)[\w.-]{12,}|\b[0-9a-fA-F]{32,}\b", "<redacted>"),
    (r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+", "<e-mail>"),
    (r"/(?:home|Users)/[^/\s\"'<>:,;]+", "~"),
)
_SHORTEST = 6  # characters of a value that is looked for: shorter ones occur by chance

_DATED = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6})\d*)?(Z|[+-]\d\d:?\d\d)?")
_GLOG = re.compile(r"\[?[IWEF](\d\d)(\d\d) (\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?")  # of torch: month, day, time


def pack(run_dir: str, file: Path | None, write_page: Callable[[], object]) -> int:
    """Pack a run's logs, metrics and page, the order of events, and what ``doctor`` says. Prints what is in the file.

    Args:
        run_dir: the run's folder, or one above it, whose own logs are packed too.
        file: to write; None for one in the current folder, named after the time.
        write_page: writes the report page into the run's folder.

    Raises:
        ConfigurationError: there is no such folder, or it holds several runs; or the file cannot be written.
    """
    from lightning_asgd.cli.doctor_command import examine
    from lightning_asgd.monitor.metric_log import FILE

    top = Path(run_dir)
    if not top.is_dir():
        raise ConfigurationError(f"{run_dir!r} is not a folder on this machine. Copy the logs here first.")
    target = file or Path(time.strftime("asgd-bundle-%Y%m%d-%H%M%S.zip"))
    if target.exists():
        raise ConfigurationError(f"{str(target)!r} is there already. Expected the name of a new file.")
    notes: list[str] = []
    runs = [top / FILE] if (top / FILE).is_file() else [*top.rglob(FILE)]
    try:
        write_page()
    except ConfigurationError as error:
        if len(runs) > 1:
            raise
        notes.append(f"No report page: {error}")
    texts = _texts(top, runs[0].parent if runs else None, notes)
    years = {name: time.localtime(changed).tm_year for name, (_, changed) in texts.items()}
    packed = {name: redacted(text, os.environ, str(Path.home())) for name, (text, _) in texts.items()}
    packed["events.txt"] = "\n".join(events_in_order(packed, years)) + "\n"
    said = examine(number_of_machines(os.environ), "auto", [], values=False)
    packed["doctor.txt"] = redacted("\n".join(said) + "\n", os.environ, str(Path.home()))
    _write(target, packed)
    sizes = [f"  {name:40} {in_bytes(len(text.encode()))}" for name, text in sorted(packed.items())]
    about = [f"{target} ({in_bytes(target.stat().st_size)}) holds", *sizes, *notes, _CLOSING]
    sys.stdout.write("\n".join(about) + "\n")
    return 0


def _texts(top: Path, run: Path | None, notes: list[str]) -> dict[str, tuple[str, float]]:
    """The files to pack, all of a run's folder and the logs in the one above: text, and when it was last changed."""
    found: dict[str, tuple[str, float]] = {}
    left, others = _ALL, 0
    for path in sorted({*top.iterdir(), *(run.rglob("*") if run else ())}):
        if path.is_symlink() or not path.is_file():
            continue
        name = path.relative_to(top).as_posix()
        if not any(fnmatch(path.name, pattern) for pattern in _PACKED):
            others += 1
            continue
        try:
            size = path.stat().st_size
            if size > min(_LARGEST, left):
                notes.append(
                    f"Not packed: {name}, {in_bytes(size)} (at most {in_bytes(_LARGEST)}, {in_bytes(_ALL)} in all)"
                )
            else:
                found[name] = path.read_text(errors="replace"), path.stat().st_mtime
                left -= size
        except OSError as error:  # such as a log that was removed meanwhile
            notes.append(f"Not packed: {name}: {error.strerror}")
    if others:
        notes.append(f"Not packed, of other kinds (checkpoints, pictures, ...): {others} files")
    return found


def _write(target: Path, packed: Mapping[str, str]) -> None:
    try:
        with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as archive:
            for name, text in packed.items():
                archive.writestr(name, text)
    except OSError as error:
        raise ConfigurationError(
            f"{str(target)!r} cannot be written: {error}. Expected a path that you can write to."
        ) from error


def redacted(text: str, environment: Mapping[str, str], home: str) -> str:
    """A text without an environment's secrets, e-mail addresses and home folders, as far as these are recognised."""
    for name, value in environment.items():
        if len(value) >= _SHORTEST and any(word in name.upper() for word in PRIVATE):
            text = text.replace(value, f"<{name}>")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    for pattern, instead in _SECRETS:
        text = re.sub(pattern, instead, text)
    return text


# ---------------------------------------------------------------------- events


def events_in_order(texts: Mapping[str, str], years: Mapping[str, int]) -> Iterator[str]:
    """The lines of all logs and the events of metrics files, in the order of time; torch's logs lack ``years``."""
    moments: list[tuple[datetime, str, str]] = []
    for name, text in texts.items():
        if name.endswith(".jsonl"):
            found = [*_of_metrics(text)]
        else:
            found = [*_of_log(text, years[name])] if any(fnmatch(name, each) for each in _LOGS) else []
        moments += [(at, name, said) for at, said in found]
    yield "# Times without a time zone are taken as local. Lines before a log's first time are left out."
    for at, name, said in sorted(moments, key=lambda moment: moment[0]):
        text = said.replace("\n", "\n    ")
        yield f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}  {name}: {text}"


def _of_metrics(text: str) -> Iterator[tuple[datetime, str]]:
    begun = last = None
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            if entry["kind"] == "fit":
                begun = last = datetime.fromisoformat(entry["started"])
                yield begun, f"a fit begins with {entry['workers']} workers"
            elif begun is not None and last is not None:
                last = begun + timedelta(seconds=entry["at_s"]) if "at_s" in entry else last
                if entry["kind"] in ("event", "end"):
                    yield last, entry.get("text") or f"the fit ends: {entry['how']}"
        except (ValueError, KeyError, TypeError, AttributeError):  # written halfway, or by another program
            continue


def _of_log(text: str, year: int) -> Iterator[tuple[datetime, str]]:
    at, lines = None, list[str]()
    for line in text.splitlines():
        found = _time_in(line[:_BEGINNING], year)
        if found is not None and at is not None:
            yield at, "\n".join(lines)
        if found is not None:
            at, lines = found, [line]
        elif len(lines) < _CONTINUED:
            lines.append(line)
    if at is not None:
        yield at, "\n".join(lines)


def _time_in(line: str, year: int) -> datetime | None:
    try:
        if found := _DATED.search(line):
            day, clock, part, zone = found.groups()
            at = datetime.fromisoformat(f"{day} {clock}.{(part or '0'):0<6}")
            if zone is None:
                return at
            minutes = 0 if zone == "Z" else int(f"{zone[0]}1") * (int(zone[1:3]) * 60 + int(zone[-2:]))
            return at.replace(tzinfo=timezone(timedelta(minutes=minutes))).astimezone().replace(tzinfo=None)
        if found := _GLOG.search(line):
            month, day, clock, part = found.groups()
            return datetime.fromisoformat(f"{year}-{month}-{day} {clock}.{(part or '0'):0<6}")
    except ValueError:  # no such day
        pass
    return None
