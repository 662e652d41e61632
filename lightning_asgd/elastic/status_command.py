"""``lightning-asgd status``: the workers of an elastic run, their speed and the progress."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from lightning_asgd.cli.console_tables import console, in_seconds, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lightning_asgd.core.calls.transport import Transport
    from lightning_asgd.core.protocol import WorkerMetrics
    from lightning_asgd.elastic.messages import Status, WorkerStatus

_START_S = 10.0
_ANSWER_S = 10.0


def status(run: str, *, watch: bool = False, every_n_seconds: float = 2.0) -> None:
    """Show the workers of an elastic run, and its progress.

    Args:
        run: "host:port/name", as `lightning-asgd serve` prints it, or only "host:port"; several hosts have commas
            between them.
        watch: update the table until Ctrl-C.
        every_n_seconds: seconds between two updates.
    """
    from lightning_asgd.core.foundation.validation import seconds

    seconds("every_n_seconds", every_n_seconds)
    screen = console()
    transport, name = _connect(run)
    try:
        view = _look(transport)
        screen.print(tables(name, view))
        while watch and not screen.is_terminal:  # there is nothing to overwrite
            time.sleep(every_n_seconds)
            before, view = view, _look(transport)
            screen.print(tables(name, view, before))
        if watch:
            from rich.live import Live

            with Live(tables(name, view), console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
                while True:
                    time.sleep(every_n_seconds)
                    before, view = view, _look(transport)
                    live.update(tables(name, view, before), refresh=True)
    finally:
        transport.close()


def _connect(asked: str) -> tuple[Transport, str]:
    from lightning_asgd.core.algorithms.config import SECRET_ENV
    from lightning_asgd.core.foundation.environment import joined, run_hosts
    from lightning_asgd.core.foundation.errors import LaunchError
    from lightning_asgd.core.job import registry
    from lightning_asgd.core.job.addresses import interface_of, local_address_towards
    from lightning_asgd.core.job.rendezvous import Rendezvous
    from lightning_asgd.hosting.run_finder import RunFinder

    hosts, name = run_hosts(asked)
    host, port = RunFinder(hosts).find(_START_S)
    rendezvous, run, keys = Rendezvous.find_run(host, port, _START_S)
    kind = registry.kind_of(run["transport"])
    if SECRET_ENV in os.environ and not kind.encrypted:
        raise LaunchError(
            f"{asked} says that it serves with transport={run['transport']!r}, but {SECRET_ENV} is set. Expected "
            "'zmq', or no secret: a foreign process may be answering there."
        )
    if name not in ("", run["run_id"]):
        raise LaunchError(f"{joined(host, port)} serves run {run['run_id']!r}. Expected {name!r}, as given.")
    kind.check_available()
    with rendezvous:
        address = rendezvous.server(0, keys[0], _START_S)
    return kind.connect([address], interface_of(local_address_towards(host))), run["run_id"]


def _look(transport: Transport) -> Status:
    from lightning_asgd.core.foundation.errors import ServerLostError
    from lightning_asgd.elastic.messages import Status, StatusRequest

    try:
        answer: Any = transport.call(0, StatusRequest(), _ANSWER_S).wait()
    except RuntimeError as error:
        raise ServerLostError(f"Server 0 did not answer within {_ANSWER_S:g} s: {error}") from error
    if not isinstance(answer, Status):
        raise ServerLostError(f"Server 0 answered {answer}. Expected servers of the same version of lightning-asgd.")
    return answer


def tables(run: str, view: Status, before: Status | None = None) -> RenderableType:
    """A run's status as tables. Rates are over the time since an earlier status, else since training began."""
    from rich.console import Group
    from rich.markup import escape

    if view.epoch is None:
        progress = "no epoch has begun"
    elif not view.steps:  # not known before the epoch ends
        progress = f"epoch {view.epoch}: {view.done} steps"
    else:
        progress = f"epoch {view.epoch}: {view.done} of {view.steps} steps ({view.done / view.steps:.0%})"
    refused = f", {view.refused} updates rejected" if view.refused else ""
    title = f"run {escape(run)}   {progress}   version {view.version}{refused}"
    headings = ("steps", "s/step", "samples\nper s", "stale-\nness", "waits", "last\nseen")
    made = table(title, "worker", "", *headings)
    earlier = {} if before is None else {worker.worker: worker for worker in before.workers}
    for worker in view.workers:
        name = f"{worker.worker}{' chief' if worker.worker == view.chief else ''}"
        state = escape(worker.about.replace(", process ", ", ")) + (" [red]disconnected[/]" if worker.away else "")
        made.add_row(name, state, *_figures(worker, earlier.get(worker.worker)), f"{worker.silent_s:.0f} s ago")
    none = [] if view.workers else ["no worker takes part now"]
    snapshot = [f"{view.snapshot}."] if view.snapshot else []
    return Group(made, *none, *map(escape, [*snapshot, *view.news]))


def _figures(worker: WorkerStatus, before: WorkerStatus | None) -> list[str]:
    from lightning_asgd.monitor.metric_definitions import Window, measures

    steps = [f"{worker.trained}", in_seconds(worker.pace_s) if worker.pace_s else ""]
    if worker.figures is None:
        return [*steps, "", "", ""]
    earlier: WorkerMetrics | None = None if before is None else before.figures
    if earlier is None or earlier.began != worker.figures.began or earlier.at_s == worker.figures.at_s:
        window = Window(worker.figures)
    else:
        window = Window(worker.figures, earlier)
    found = measures([window])
    staleness = found.get("staleness/mean")
    waits = found.get("wait/exchange", 0.0) + found.get("wait/sync", 0.0)  # as the report's page
    return [
        *steps,
        f"{found['samples_per_s']:,.0f}",
        "" if staleness is None else f"{staleness:.1f}",
        f"{waits:.0%}",
    ]
