"""What the machines of a job must have in common. The process that hosts the job's rendezvous publishes it there."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from lightning_asgd.core.foundation.environment import joined
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.protocol import PROTOCOL

FACTS_KEY = "facts"
"""Where the host's :func:`facts` are."""

REFUSED_KEY = "refused"
"""Where the latest worker that could not join says so: its number, and why."""

_OWN = "lightning-asgd"
_LONGEST = 2000  # characters


def facts() -> dict[str, Any]:
    """The versions on this machine, of this package and of those that it needs."""
    found: dict[str, Any] = {"protocol": PROTOCOL, "Python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):  # used from its sources
        found[_OWN] = metadata.version(_OWN)
        for need in metadata.requires(_OWN) or ():
            if "extra ==" not in need:
                name = re.split(r"[^\w.-]", need)[0]
                found[name] = metadata.version(name)
    return found


def publish_facts(rendezvous: Rendezvous, **of_job: Any) -> None:
    """Publish this machine's facts, and the job's, such as ``num_nodes``. Earlier refusals are forgotten."""
    rendezvous.put(REFUSED_KEY, {})
    rendezvous.put(FACTS_KEY, {**facts(), **of_job})


def check_facts(rendezvous: Rendezvous, call: str = "", workers: int = 0) -> None:
    """Raise a ``LaunchError`` if the job has messages of another version, or another number of workers in a call."""
    theirs: dict[str, Any] = {}
    with contextlib.suppress(RuntimeError):  # of the rendezvous
        theirs = rendezvous.peek(FACTS_KEY, dict) or {}
    here, there = platform.node(), f"the job at {joined(*rendezvous.address)}"
    error: LaunchError | None = None
    if theirs.get("protocol", PROTOCOL) != PROTOCOL:
        error = LaunchError(
            f"{here} has {_OWN} {facts().get(_OWN)} with protocol {PROTOCOL}, but {there} has {_OWN} "
            f"{theirs.get(_OWN)} with protocol {theirs['protocol']}. Expected the same version on every machine."
        )
    elif call and theirs.get("call") == call and theirs.get("workers") != workers:
        error = LaunchError(
            f"{here} takes part in a job of {workers} workers, but {there} has {theirs.get('workers')}. Expected the "
            "same devices and num_nodes on every machine, and no process that is left of an earlier job."
        )
    if error is not None:
        error.final = True
        raise error


def refused_in(rendezvous: Rendezvous | None) -> tuple[int | None, str] | None:
    """The number of a worker that could not join, None in an elastic run, and why; None if there is no such worker."""
    with contextlib.suppress(RuntimeError):  # of the rendezvous
        match None if rendezvous is None else rendezvous.peek(REFUSED_KEY, dict):
            case {"worker": int() | None as worker, "why": str(why)}:
                return worker, why[:_LONGEST]
    return None


@contextlib.contextmanager
def telling_if_refused(rendezvous: Rendezvous, worker: int | None = None) -> Iterator[None]:
    """Let the job know of a final error within, with which this worker cannot join; None is one of an elastic run."""
    try:
        yield
    except LaunchError as error:
        if error.final:
            who = "A worker" if worker is None else f"Worker {worker}"
            with contextlib.suppress(RuntimeError):
                why = f"{who} cannot join: {error}"
                rendezvous.put(REFUSED_KEY, {"worker": worker, "why": why})
        raise
    with contextlib.suppress(RuntimeError):
        if (found := refused_in(rendezvous)) is not None and found[0] == worker:
            rendezvous.put(REFUSED_KEY, {})  # this process has taken the place of the refused one
