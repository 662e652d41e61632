"""``lightning-asgd serve``: servers that outlive their workers."""

from __future__ import annotations

import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lightning_asgd.transports.rendezvous import Rendezvous

__all__ = ["serve"]

_START_S = 60.0
_POLL_S = 0.5


def serve(
    *,
    port: int,
    run_id: str,
    host: str = "127.0.0.1",
    num_servers: int = 1,
    transport: Literal["rpc", "zmq"] = "rpc",
    snapshots: Path | None = None,
    snapshot_every_s: float = 60.0,
) -> None:
    """Start the servers of an elastic run.

    Trainers attach to the run and leave it at any time. Ctrl-C or SIGTERM stops the servers, and ends the run unless it
    has snapshots: the same command continues from them.

    Args:
        port: port at which workers find the run. Other machines must reach it, and the ports that the servers choose.
        run_id: name of the run, of your choice. Give workers the same name.
        host: address of this machine to listen at. At the default only workers on this machine reach the servers.
        num_servers: processes that share the weights equally.
        transport: "rpc" is torch's, without authentication. "zmq" encrypts every connection, and accepts only processes
            with the same secret in the environment variable LIGHTNING_ASGD_SECRET.
        snapshots: folder for snapshots of weights, optimizer states and progress. If it holds snapshots of this run,
            the run continues from them. Without a folder the run ends with its servers.
        snapshot_every_s: seconds between two snapshots. If all servers are lost at once, the updates since the latest
            snapshot are lost.
    """
    # Here, since torch comes with them: help and other commands do without.
    from lightning_asgd.config import seconds
    from lightning_asgd.processes import supervisor
    from lightning_asgd.server.server_process import ServerSettings
    from lightning_asgd.server.snapshot_store import Snapshots
    from lightning_asgd.transports import registry
    from lightning_asgd.transports.rendezvous import Rendezvous, interface_of

    seconds("snapshot_every_s", snapshot_every_s)
    version = None if snapshots is None else Snapshots(snapshots).check(run_id, num_servers)
    kind = registry.kind_of(transport)
    kind.check_available()
    kind.provide_secret(one_machine=False)
    stopped, rendezvous = _signals(), Rendezvous.host(host, port)
    settings = ServerSettings(
        interface=interface_of(socket.gethostbyname(host)),
        transport=transport,
        run=run_id,
        snapshots="" if snapshots is None else str(snapshots.resolve()),
        snapshot_every_s=snapshot_every_s,
    )
    try:
        overseer = supervisor.ensure(num_servers, rendezvous, settings)
        overseer.hot_standby = True
        keys = overseer.keys(num_servers)
        _await_servers(rendezvous, keys)
        rendezvous.announce_run(run_id, transport, keys)
        _explain(run_id, num_servers, f"{host}:{rendezvous.address[1]}", snapshots, version)
        while not stopped:
            time.sleep(_POLL_S)
            overseer.check_servers()
    finally:
        supervisor.close_current()


def _await_servers(rendezvous: Rendezvous, keys: list[str]) -> None:
    for index, key in enumerate(keys):
        rendezvous.server(index, key, _START_S)


def _signals() -> list[int]:
    """The signals that stop the servers, as they arrive."""
    stopped: list[int] = []  # not an event: its lock is not for a handler that may interrupt itself
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    return stopped


def _explain(run_id: str, num_servers: int, address: str, snapshots: Path | None, version: int | None) -> None:
    """Say how workers find the run, and what it goes on from."""
    servers = "1 server" if num_servers == 1 else f"{num_servers} servers"
    sys.stdout.write(
        f"Run {run_id!r} has {servers} at {address}. Workers attach themselves with\n"
        f'  Trainer(strategy=ASGDStrategy(server="{address}", run_id={run_id!r}), ...)\n'
    )
    if version is not None:
        sys.stdout.write(f"It goes on from its snapshots in {snapshots}, version {version}.\n")
    sys.stdout.flush()
