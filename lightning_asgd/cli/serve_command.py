"""``lightning-asgd serve``: servers that outlive their workers."""

from __future__ import annotations

import signal
import sys
import tempfile
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
    transport: Literal["auto", "rpc", "zmq"] = "auto",
    snapshots: Path | None = None,
    snapshot_every_s: float = 60.0,
) -> None:
    """Start the servers of an elastic run.

    Trainers attach to the run and leave it at any time. Ctrl-C or SIGTERM stops the servers, and ends the run unless it
    has snapshots: the same command continues from them.

    Args:
        port: port at which workers find the run. With "zmq" they need no other; with "rpc" they need all, in both ways.
        run_id: name of the run, of your choice. Give workers the same name.
        host: name or address of this machine to listen at, IPv4 or IPv6. At the default only workers on this machine
            reach the servers, and those for which a tunnel ends there.
        num_servers: processes that share the weights equally.
        transport: "rpc" is torch's, without authentication. "zmq" encrypts every connection, and accepts only processes
            with the same secret in the environment variable LIGHTNING_ASGD_SECRET. "auto" is "zmq" where that is set.
        snapshots: folder for snapshots of weights, optimizer states and progress. If it holds snapshots of this run,
            the run continues from them. Without a folder the run ends with its servers.
        snapshot_every_s: seconds between two snapshots. If all servers are lost at once, the updates since the latest
            snapshot are lost.
    """
    # Here, since they import torch, which help and other commands do not need.
    from lightning_asgd.cli.servers_health import ServersHealth
    from lightning_asgd.processes import supervisor
    from lightning_asgd.server.server_process import ServerSettings

    _check(port, run_id, host, num_servers, snapshot_every_s)
    version = None if snapshots is None else _version_in(snapshots, run_id, num_servers)
    stopped, (name, line, rendezvous, interface) = _signals(), _open(transport, host, port)
    settings = ServerSettings(
        interface=interface,
        transport=name,
        run=run_id,
        snapshots="" if snapshots is None else str(snapshots.resolve()),
        snapshot_every_s=snapshot_every_s,
    )
    try:
        with ServersHealth(run_id, rendezvous, name, settings.interface) as health:
            overseer = supervisor.ensure(num_servers, rendezvous, settings)
            overseer.hot_standby = True
            keys = overseer.keys(num_servers)
            for index, key in enumerate(keys):
                rendezvous.server(index, key, _START_S)
            rendezvous.announce_run(run_id, name, keys)
            health.keys = keys
            _explain(run_id, num_servers, rendezvous.address, line, (snapshots, version))
            while not stopped:
                time.sleep(_POLL_S)
                overseer.check_servers()
    finally:
        supervisor.close_current()
        rendezvous.close()


def _check(port: int, run_id: str, host: str, num_servers: int, snapshot_every_s: float) -> None:
    """Raise a ``ConfigurationError`` for a value that is out of range."""
    from lightning_asgd.config import seconds
    from lightning_asgd.errors import ConfigurationError
    from lightning_asgd.validation import between, whole

    seconds("snapshot_every_s", snapshot_every_s)
    whole("num_servers", num_servers)
    between("port", port, 0, 65535)
    if not run_id:
        raise ConfigurationError("run_id=''. Expected a name of your choice, such as run_id=my-model.")
    if host in ("", "0.0.0.0", "::"):
        raise ConfigurationError(f"host={host!r}. Expected the address at which workers reach this machine.")


def _version_in(snapshots: Path, run_id: str, num_servers: int) -> int | None:
    """The version of a folder's snapshots; None if there are none.

    Raises a ``ConfigurationError`` for a folder that snapshots cannot be written to: they are written much later.
    """
    from lightning_asgd.errors import ConfigurationError
    from lightning_asgd.server.snapshot_store import Snapshots

    try:
        snapshots.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=snapshots).close()
    except OSError as error:
        text = f"snapshots={str(snapshots)!r} cannot be written to: {error}. Expected a folder of this user's."
        raise ConfigurationError(text) from error
    return Snapshots(snapshots).check(run_id, num_servers)


def _open(transport: str, host: str, port: int) -> tuple[str, str, Rendezvous, str]:
    """The transport's name, a line about it, the rendezvous, and the network interface that servers listen on."""
    from lightning_asgd.errors import LaunchError
    from lightning_asgd.server.server_process import allow_many_connections
    from lightning_asgd.transports import registry
    from lightning_asgd.transports.addresses import interface_of, joined, resolve

    name, why, who = registry.choose(transport, one_machine=False)
    kind = registry.kind_of(name)
    kind.check_available()
    kind.provide_secret(one_machine=False)
    allow_many_connections()
    try:
        rendezvous = kind.host_rendezvous(host, port)
    except LaunchError as error:  # its advice is for jobs
        raise LaunchError(
            f"Cannot listen on {joined(host, port)}: {error.__cause__}. "
            "Give another --port, or a --host of this machine."
        ) from error
    interface = kind.open_to_others(rendezvous, interface_of(resolve(host)))
    return name, f"Transport {name} ({why}) {who}", rendezvous, interface


def _signals() -> list[int]:
    """The signals that stop the servers, as they arrive."""
    stopped: list[int] = []  # not an event: its lock is not for a handler that may interrupt itself
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    return stopped


def _explain(
    run_id: str, servers: int, where: tuple[str, int], line: str, found: tuple[Path | None, int | None]
) -> None:
    """Print how workers find the run, the snapshots that it continues from, and the line about its transport."""
    from lightning_asgd.transports.addresses import joined

    address, number = joined(*where), "1 server" if servers == 1 else f"{servers} servers"
    snapshots, version = found
    sys.stdout.write(
        f"Run {run_id!r} has {number} at {address}. Workers attach with\n"
        f'  Trainer(strategy=ASGDStrategy(server="{address}", run_id={run_id!r}), ...)\n'
    )
    if version is not None:
        sys.stdout.write(f"It continues from its snapshots in {snapshots}, version {version}.\n")
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
