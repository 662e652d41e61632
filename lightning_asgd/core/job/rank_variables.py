"""The environment variables that say which worker a process is, and the process that they belong to.

Lightning, torch and data sets read a worker's rank from its environment, so the variables stay set until the worker
ends, and every program that it starts inherits them. Such a program would take itself for the worker and wait for the
others. Each worker therefore notes in :data:`OWNER_ENV` its process number and the variables that this package, or
Lightning's launcher below it, has set. A new interpreter that finds another process's note removes these variables.
What torchrun, SLURM or a user has set is not in the note, and stays. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import Any

from lightning_asgd.core.foundation.errors import ConfigurationError

RANK_VARIABLES = ("RANK", "GLOBAL_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "NODE_RANK", "NNODES")
"""Variables that say which worker a process is."""

RENDEZVOUS_ENV = "LIGHTNING_ASGD_RENDEZVOUS"
"""For a worker that the launcher starts: the address where its job's processes find each other, the variables that were
set before, and a folder for loaders' sockets. The worker takes it out of its environment on importing this package."""

OWNER_ENV = "LIGHTNING_ASGD_OWNER"
"""The note: process number, address, the variables with their values, and torchrun's number of the machine."""

_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
_COUNTS = "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NTASKS"  # numbers of at least 1
_NUMBERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_PORT", "STANDALONE_PORT", *_COUNTS)
_GROUP_RANK = "GROUP_RANK"  # torchrun sets it, and neither this package nor Lightning
_address: str | None = None  # the address of the job's rendezvous
_main: int | None = None  # the process that has started this worker and its servers


def address() -> str | None:
    """``host:port`` of the rendezvous that this process hosts, or was started for; None if there is none yet."""
    return _address


def keep_address(value: str) -> None:
    """Note where this process hosts the rendezvous: its next Trainers use it too."""
    global _address
    _address = value


def note_main(process: int | None) -> None:
    """Note the process that has started this worker and its servers."""
    global _main
    _main = process


os.register_at_fork(after_in_child=lambda: note_main(None))  # it is another one's child; if a worker, it notes its own


def main_process() -> int | None:
    """The process that has started this worker and its servers; None if that is not known."""
    return _main


def set_by_others() -> set[str]:
    """The variables that a user or another launcher has set."""
    mine = _note().get("variables", {})
    return {name for name, value in _present().items() if mine.get(name) != value}


@contextlib.contextmanager
def naming() -> Iterator[None]:
    """Raise a :class:`ConfigurationError` that names the variable, where Lightning cannot read one in the block."""
    try:
        yield
    except (KeyError, ValueError) as error:
        run = os.environ.get("TORCHELASTIC_RUN_ID")
        if run is not None and error.args[0] in RANK_VARIABLES:
            raise ConfigurationError(
                f"The environment has TORCHELASTIC_RUN_ID={run!r}, but lacks {error.args[0]}, which torchrun sets, "
                "too. Start the program with torchrun, or unset it."
            ) from error
        for name in _NUMBERS:
            number(name, 1)
        raise


def number(name: str, otherwise: int) -> int:
    """A variable's value, or ``otherwise`` if it is not set. Raises a :class:`ConfigurationError` that names it."""
    text, least = os.environ.get(name, str(otherwise)), int(name in _COUNTS)
    with contextlib.suppress(ValueError):
        if int(text) >= least:
            return int(text)
    raise ConfigurationError(
        f"The environment has {name}={text!r}. Expected a whole number of at least {least}. Correct or unset it."
    )


def listed() -> str:
    """What a user or another launcher has set, for errors: ``The environment has RANK=1``; empty if nothing."""
    names = [name for name in _VARIABLES if name in set_by_others()] + [_GROUP_RANK] * (_GROUP_RANK in os.environ)
    return f"The environment has {', '.join(f'{name}={os.environ[name]}' for name in names)}" if names else ""


@contextlib.contextmanager
def owning() -> Iterator[None]:
    """Note the variables that are set within the block as this process's own."""
    theirs = set_by_others()
    try:
        yield
    finally:
        owned = {name: value for name, value in _present().items() if name not in theirs}
        if owned:
            _write_note(owned)


@contextlib.contextmanager
def launching(folder: str) -> Iterator[None]:
    """Start workers within the block, whose loaders use ``folder``; the variables that it sets are owned."""
    os.environ[RENDEZVOUS_ENV] = json.dumps({"address": _address, "given": sorted(set_by_others()), "folder": folder})
    try:
        with owning():
            yield
    finally:
        del os.environ[RENDEZVOUS_ENV]


def detect() -> bool:
    """Find out which worker this process is, when the package is imported. True if it was taken for another one."""
    global _address
    launched = os.environ.pop(RENDEZVOUS_ENV, None)
    if launched is not None:
        told = _read(RENDEZVOUS_ENV, launched, "given")
        _address = told["address"]
        use_folder(told.get("folder"))
        if os.environ.get("NODE_RANK", "0") == "0":  # elsewhere the parent has started no servers
            note_main(os.getppid())
        _write_note({name: value for name, value in _present().items() if name not in told["given"]})
        return False
    if _note():
        _address = _note()["address"]  # the process has replaced its program, and is the same worker
        return False
    if OWNER_ENV not in os.environ or _is_helper():
        return False
    note = _read(OWNER_ENV, os.environ.pop(OWNER_ENV), "variables")
    inherited = note["variables"]
    by_torchrun = os.environ.get(_GROUP_RANK) != note.get("group_rank")
    if by_torchrun or any(os.environ.get(name, value) != value for name, value in inherited.items()):
        return False  # another launcher, such as torchrun, has started the program and set its own variables
    for name in inherited:
        os.environ.pop(name, None)
    return bool(inherited) and not {"RANK", "LOCAL_RANK"} & _present().keys()


def use_folder(folder: str | None) -> None:
    """Let this process's loaders put their sockets into a folder: a killed loader cannot remove one of its own."""
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def _present() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def _note() -> dict[str, Any]:
    """This process's own note; empty if it has none."""
    note = _read(OWNER_ENV, os.environ.get(OWNER_ENV, '{"address": null, "variables": {}}'), "variables")
    return note if note.get("pid") == os.getpid() else {}


def _read(name: str, text: str, entry: str) -> dict[str, Any]:
    """What this package has written to a variable, with an ``entry`` beside the address."""
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and {"address", entry} <= found.keys():
            return found
    raise ConfigurationError(f"The environment has {name}={text}, which this package has not written. Unset it.")


def _write_note(variables: dict[str, str]) -> None:
    note = {"address": _address, "variables": variables, "group_rank": os.environ.get(_GROUP_RANK)}
    os.environ[OWNER_ENV] = json.dumps({"pid": os.getpid(), **note})


def _is_helper() -> bool:
    """Whether this process works for its parent, as those of a DataLoader do: it is the same worker."""
    # Before its target runs, a spawned process and a fork server are known by their command only.
    return multiprocessing.parent_process() is not None or "from multiprocessing." in " ".join(sys.orig_argv)
