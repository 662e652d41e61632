"""``lightning-asgd serve``: servers that outlive their workers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_asgd.core.job.rendezvous import Rendezvous
    from lightning_asgd.core.job.supervisor import Supervisor
    from lightning_asgd.core.server.process import ServerSettings
    from lightning_asgd.hosting.host_entry import HostEntry
    from lightning_asgd.hosting.lent_servers import ServerBorrower

_LEASE_S = 2.5
_START_S = 60.0
_POLL_S = 0.2
_POLL = 0.08  # of the lease, where this is running


def serve(
    run: str,
    *,
    num_servers: int = 1,
    transport: Literal["auto", "rpc", "zmq"] = "auto",
    snapshots: Path | None = None,
    snapshot_every_s: float = 60.0,
    on_snapshot_failure: Literal["continue", "stop"] = "continue",
    join: str | None = None,
    machines: int = 1,
    lease_s: float = _LEASE_S,
) -> None:
    """Start the servers of an elastic run.

    Trainers attach to the run and leave it at any time. Ctrl-C or SIGTERM stops the servers, and ends the run unless it
    has snapshots: the same command continues from them. If other machines have joined with --join, one of them takes
    the run over.

    Args:
        run: "host:port/name": the address of this machine at which workers find the run, the port, and a name of your
            choice. With "zmq" no other port is used; "rpc" needs all ports in both directions. At 127.0.0.1 only
            workers on this machine reach the servers, and those for which a tunnel ends there.
        num_servers: processes that share the weights equally. With --join as many as the run has.
        transport: "rpc" is torch's, without authentication. "zmq" encrypts every connection, and accepts only processes
            with the same secret in the environment variable LIGHTNING_ASGD_SECRET. "auto" is "zmq" where that is set.
        snapshots: folder for snapshots of weights, optimizer states and progress. If it holds snapshots of this run,
            the run continues from them. Without a folder the run ends with its servers.
        snapshot_every_s: seconds between two snapshots. If all servers are lost, so are the updates since the latest.
        on_snapshot_failure: if one cannot be written, "continue" with a warning, or "stop" with exit code 1.
        join: "host:port" of a host of the same run. This machine stands by, and takes the run over when the host that
            serves is lost. Give workers the addresses of all hosts.
        machines: number of machines among which the servers are divided, with this one. The others join with --join,
            and the run begins once they have. A lost machine's servers are started here, from the workers' copies.
        lease_s: if other hosts have joined with --join: seconds for which this host keeps serving without hearing from
            them or from workers, 0.5 to 4. Joining hosts use the same value. A host whose machine is lost is replaced
            after about 2.5 times as long. A value below the pauses of a busy machine replaces healthy hosts, too.
    """
    from lightning_asgd.core.foundation.environment import server_address
    from lightning_asgd.core.job import supervisor  # here, since it imports torch, which help does not need
    from lightning_asgd.hosting.lent_servers import ServerBorrower, servers_of_machine

    host, port, run_id = _checked(run, join, num_servers, snapshot_every_s, lease_s)
    _check_machines(machines, num_servers, join, snapshots)
    where, stopped = None if join is None else server_address(join, "join"), _signals()
    name, line, rendezvous, interface = _open(transport, host, port)
    with contextlib.ExitStack() as ends:
        ends.callback(rendezvous.close)
        entry = _entry(run_id, name, num_servers, rendezvous.address, where, lease_s, stopped)
        version = _version_in(snapshots, run_id, entry.servers, ends, joins=join is not None)
        ends.callback(supervisor.close_current)
        settings = _settings(entry, interface, snapshots, snapshot_every_s, on_snapshot_failure)
        mine = len(servers_of_machine(entry.servers, machines, 0))
        overseer = supervisor.ensure(mine, rendezvous, settings, succeed=join is not None)
        borrower = ServerBorrower(entry, rendezvous, settings, machines) if machines > 1 else None
        explain = partial(_explain, entry, join, line, (snapshots, version), machines)
        _host(entry, rendezvous, overseer, interface, borrower, explain, stopped)
    _check_written(overseer, snapshots)


def _host(
    entry: HostEntry,
    rendezvous: Rendezvous,
    overseer: Supervisor,
    interface: str,
    borrower: ServerBorrower | None,
    explain: Callable[[], None],
    stopped: list[int],
) -> None:
    """Host the run, or stand by, until a signal has stopped this process."""
    from lightning_asgd.core.foundation.errors import LaunchError
    from lightning_asgd.elastic.run_hosting import RunHosting
    from lightning_asgd.elastic.servers_health import ServersHealth

    with ServersHealth(entry.run, rendezvous, entry.transport, interface) as health:
        for index, key in enumerate(overseer.keys(entry.servers)):
            rendezvous.server(index, key, _START_S, check=lambda: _check_stopped(stopped))
        with RunHosting(entry, rendezvous, overseer, interface, borrower) as hosting:
            health.keys = hosting.keys
            until = time.monotonic() + _START_S
            while not stopped and not overseer.unwritten:
                hosting.step()
                if hosting.takes_part and until:
                    explain()
                    until = 0.0
                if until and time.monotonic() > until:
                    raise LaunchError(
                        f"The present host of run {entry.run!r} has not reached this one at {entry.address} within "
                        f"{_START_S:g} s. Expected an address that all hosts reach. Give another one."
                    )
                time.sleep(min(_POLL_S, _POLL * entry.lease_s))
                health.keys = hosting.keys
                overseer.check_servers()
            hosting.leave()


def _entry(
    run_id: str,
    transport: str,
    num_servers: int,
    address: tuple[str, int],
    join: tuple[str, int] | None,
    lease_s: float,
    stopped: list[int],
) -> HostEntry:
    """What this host publishes first. Raises a ``LaunchError`` if there is no such run at the address to ``join``."""
    from lightning_asgd.core.foundation.environment import joined
    from lightning_asgd.core.foundation.errors import LaunchError
    from lightning_asgd.hosting.host_entry import HostEntry, ask_host

    me = joined(*address)
    if join is None:
        return HostEntry(run_id, transport, num_servers, me, term=1, present=me, hosts=(me,), lease_s=float(lease_s))
    until = time.monotonic() + _START_S
    while not isinstance(found := ask_host(*join), HostEntry):
        _check_stopped(stopped)
        if isinstance(found, LaunchError):
            raise found
        if time.monotonic() > until:
            raise LaunchError(
                f"No host of a run answers at {joined(*join)} within {_START_S:g} s. Expected `lightning-asgd serve` "
                "there. Start it, or check --join and the network."
            )
        time.sleep(_POLL_S)
    same = (found.run, found.transport) == (run_id, transport)
    if not same or num_servers not in (1, found.servers) or lease_s not in (_LEASE_S, found.lease_s):
        raise LaunchError(
            f"{joined(*join)} hosts run {found.run!r} with transport={found.transport!r}, "
            f"num_servers={found.servers} and lease_s={found.lease_s:g}. Expected the same here, where "
            f"run {run_id!r}, transport={transport!r}, num_servers={num_servers} and lease_s={lease_s:g}."
        )
    return HostEntry(run_id, transport, found.servers, me, hosts=(found.address,), lease_s=found.lease_s)


def _check_written(overseer: Supervisor, snapshots: Path | None) -> None:
    """Raise a ``SnapshotError`` if a server has ended that could not write its last snapshot."""
    from lightning_asgd.core.foundation.errors import SnapshotError

    for server, output in overseer.unwritten.items():
        raise SnapshotError(
            f"Server {server} was stopped and could not write its last snapshot to {snapshots}. Updates since the one "
            "before are held only by workers that still wait for this run. Make room there and give the same command "
            f"again while they wait. The server's last output: {output}"
        )


def _settings(
    entry: HostEntry, interface: str, snapshots: Path | None, snapshot_every_s: float, on_failure: str
) -> ServerSettings:
    from lightning_asgd.core.server.process import ServerSettings

    folder = "" if snapshots is None else str(snapshots.resolve())
    about: Any = {"run": entry.run, "snapshots": folder, "snapshot_every_s": snapshot_every_s}
    return ServerSettings(interface, entry.transport, snapshot_or_end=on_failure == "stop", **about)


def _checked(
    run: str, join: str | None, num_servers: int, snapshot_every_s: float, lease_s: float
) -> tuple[str, int, str]:
    """Host, port and name of the run. Raises a ``ConfigurationError`` for a value that is out of range."""
    from lightning_asgd.core.foundation.environment import run_hosts
    from lightning_asgd.core.foundation.errors import ConfigurationError
    from lightning_asgd.core.foundation.validation import between, seconds, whole
    from lightning_asgd.hosting.host_entry import LONGEST_S, SHORTEST_S

    seconds("snapshot_every_s", snapshot_every_s)
    whole("num_servers", num_servers)
    between("lease_s", lease_s, SHORTEST_S, LONGEST_S)
    hosts, name = run_hosts(run)
    other = (join or "").partition("/")[2] not in ("", name)
    if not name or other or len(hosts) > 1 or hosts[0][0] in ("0.0.0.0", "::"):
        raise ConfigurationError(
            f"run={run!r}. Expected the address at which workers reach this machine, a port and a name, such as "
            "10.0.0.1:29400/my-model; with --join that run's name."
        )
    return *hosts[0], name


def _check_machines(machines: int, num_servers: int, join: str | None, snapshots: Path | None) -> None:
    from lightning_asgd.core.foundation.errors import ConfigurationError
    from lightning_asgd.core.foundation.validation import whole

    whole("machines", machines)
    if machines > 1 and join is not None:
        raise ConfigurationError(
            f"machines={machines} was given with join={join!r}. Expected --machines at the first host only."
        )
    if machines > num_servers:
        raise ConfigurationError(
            f"machines={machines} was given with num_servers={num_servers}. Expected at least one server per machine."
        )
    if machines > 1 and snapshots is not None:
        raise ConfigurationError(
            f"machines={machines} was given with snapshots={str(snapshots)!r}. Expected no snapshots: each machine "
            "would write those of its own servers. If servers are lost, workers restore them."
        )


def _version_in(
    snapshots: Path | None, run_id: str, num_servers: int, ends: contextlib.ExitStack, *, joins: bool
) -> int | None:
    """The version of a folder's snapshots; None if there are none. Other runs are kept from it until a host ``ends``.

    Raises a ``ConfigurationError`` for a folder that snapshots cannot be written to: they are written much later.
    """
    from lightning_asgd.core.foundation.errors import ConfigurationError
    from lightning_asgd.recovery.snapshot_store import Snapshots

    if snapshots is None:
        return None
    try:
        snapshots.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=snapshots).close()
        ends.callback(os.close, Snapshots(snapshots).lock(run_id, joins=joins))
    except OSError as error:
        text = f"snapshots={str(snapshots)!r} cannot be written to: {error}. Expected a folder of this user's."
        raise ConfigurationError(text) from error
    return Snapshots(snapshots).check(run_id, num_servers)


def _open(transport: str, host: str, port: int) -> tuple[str, str, Rendezvous, str]:
    """The transport's name, a line about it, the rendezvous, and the network interface that servers listen on."""
    from lightning_asgd.core.foundation.environment import joined
    from lightning_asgd.core.foundation.errors import LaunchError
    from lightning_asgd.core.job import registry
    from lightning_asgd.core.job.addresses import LOOPBACK, interface_of, local_address_towards, resolve
    from lightning_asgd.core.server.process import allow_many_connections

    local_address_towards(LOOPBACK)  # else its error would be taken for that of the port
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
            "Give another port, or an address of this machine."
        ) from error
    interface = kind.open_to_others(rendezvous, interface_of(resolve(host)))
    return name, f"Transport {name} ({why}) {who}", rendezvous, interface


def _signals() -> list[int]:
    """The signals that stop the servers, as they arrive."""
    stopped: list[int] = []  # not an event: its lock is not for a handler that may interrupt itself
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, lambda number, _: stopped.append(number))
    return stopped


def _check_stopped(stopped: list[int]) -> None:
    """Exit if a signal came while the servers were starting."""
    if stopped:
        sys.stdout.write("Stopped before the servers had started.\n")
        raise SystemExit(0)


def _explain(
    entry: HostEntry, join: str | None, line: str, found: tuple[Path | None, int | None], machines: int
) -> None:
    """Print how workers find the run, the snapshots that it continues from, and the line about its transport."""
    number = "1 server" if entry.servers == 1 else f"{entry.servers} servers"
    snapshots, version = found
    if join is None:
        known, has = entry.address, f"Run {entry.run!r} has {number} at {entry.address}."
    else:
        known = f"{join.partition('/')[0]},{entry.address}"
        has = f"{entry.address} stands by for run {entry.run!r}, with {number}."
    sys.stdout.write(f'{has} Workers attach with\n  Trainer(strategy=ASGDStrategy(run="{known}/{entry.run}"), ...)\n')
    if version is not None and join is None:
        sys.stdout.write(f"It continues from its snapshots in {snapshots}, version {version}.\n")
    if machines > 1:
        others = "one more machine has" if machines == 2 else f"{machines - 1} more machines have"
        sys.stdout.write(
            f"Workers can attach once {others} joined with\n"
            f"  lightning-asgd serve HOST:PORT/{entry.run} --join {entry.address}\n"
        )
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
