"""Where the processes of a job meet, and by which transport: what a process hosts for that, and what it releases."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_asgd.core.foundation.environment import SECRET_ENV
from lightning_asgd.core.foundation.errors import LaunchError
from lightning_asgd.core.job import rank_variables, registry
from lightning_asgd.core.job.addresses import local_address_towards, resolve
from lightning_asgd.core.job.registry import TransportKind
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.server.process import allow_many_connections
from lightning_asgd.hosting import placed_servers
from lightning_asgd.hosting.returned_host import Moved, Signpost
from lightning_asgd.hosting.server_hosts import ServerHosts

log = logging.getLogger(__name__)

_LAST_PORT = 65535


@dataclass(frozen=True)
class Surroundings:
    """A process among those of its job, and what starts them."""

    rank: int
    world_size: int
    local_rank: int
    num_nodes: int
    external: bool  # whether this process starts no workers, since a user or another program does
    by_hand: bool  # whether a user starts them, and neither torchrun nor SLURM
    main: Callable[[], tuple[str, int]]  # address at which worker 0 can host the rendezvous
    node: Callable[[], int] = lambda: 0  # number of this process's machine
    foreign: bool = False  # whether ranks and world come from neither torch's nor Lightning's variables


_hosted: dict[tuple[str, int], Rendezvous] = {}  # kept alive: the store lives as long as its host
_said: set[str] = set()
_own: Rendezvous | None = None  # that this process keeps ready
_hosts: ServerHosts | None = None  # of this process's job, for all its Trainers
_signpost: Signpost | None = None
_inherited: list[Any] = []  # the parent's, of a forked process, which must not close it


def _after_fork() -> None:
    global _hosts, _own
    _inherited.append((dict(_hosted), _hosts, _own))
    with contextlib.suppress(OSError):
        _release({port for _, port in _hosted})
    _hosted.clear()
    _hosts = _own = None


def _release(ports: set[int]) -> None:
    """Let go of sockets that listen there, or the ports would stay taken after the end of the process that serves."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number in map(int, os.listdir("/proc/self/fd") if ports else ()):
        with contextlib.suppress(OSError):  # no socket
            found = socket.socket(fileno=number)
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] in ports:
                os.dup2(nothing, number)  # not closed: what is inherited would close another file of that number
            found.detach()
    os.close(nothing)


os.register_at_fork(after_in_child=_after_fork)


def choose_transport(
    asked: str, *, one_machine: bool, say: Callable[[str], None] | None
) -> tuple[str, str, TransportKind]:
    """The transport of a job, and why. With ``say``, one line in a process says who could get in, or warns."""
    name, why, who = registry.choose(asked, one_machine=one_machine)
    line = f"Transport {name} {who}"
    kind = registry.kind_of(name)
    kind.check_available()
    if say is not None and line not in _said:
        (say if kind.encrypted else log.warning)(line)
        _said.add(line)
    return name, why, kind


def find_address(kind: TransportKind, place: Surroundings, *, is_main: bool) -> tuple[str, int]:
    """The address of a job's rendezvous, which the main process hosts unless it does already."""
    known = rank_variables.address()  # of jobs on this machine
    if known is not None and place.num_nodes == 1:
        host, _, port = known.rpartition(":")
        return host, int(port)
    if place.num_nodes == 1 and not place.external:
        allow_many_connections()
        rendezvous = kind.host_rendezvous()
        _hosted[rendezvous.address] = rendezvous
        rank_variables.keep_address(f"{rendezvous.address[0]}:{rendezvous.address[1]}")
        return rendezvous.address
    given = os.environ["MASTER_PORT"] if "MASTER_PORT" in rank_variables.set_by_others() else None
    check_port(given, place.num_nodes, by_hand=place.by_hand)
    address = place.main()
    local_address_towards(address[0])
    if is_main and not agent_hosts() and address not in _hosted:
        allow_many_connections()
        _hosted[address] = kind.host_rendezvous(*address)
    return address


def check_port(given: str | None, num_nodes: int, *, by_hand: bool) -> None:
    """Raise a ``LaunchError`` for a ``MASTER_PORT`` at which a job's processes cannot meet.

    ``given`` is None if it is not set, or only by this package; ``by_hand``: neither torchrun nor SLURM starts them.
    """
    if given is None and num_nodes > 1 and by_hand:
        raise LaunchError(
            f"num_nodes={num_nodes} but MASTER_PORT is not set. Expected MASTER_ADDR and MASTER_PORT to be "
            "the same on every machine: set MASTER_PORT to a free port of the first one."
        )
    if given is not None and given.isdecimal() and int(given) == 0:
        raise LaunchError(
            "MASTER_PORT is 0. Expected a port that is the same on every machine. Start torchrun with "
            "--standalone or --rdzv-backend=c10d on one machine, or give --master-port a free port."
        )
    if given is not None and not (given.isdecimal() and int(given) <= _LAST_PORT):
        raise LaunchError(
            f"MASTER_PORT is {given!r}. Expected a number from 1 to {_LAST_PORT}, the same on every machine. Set it to "
            "a free port of the first one."
        )


def hosted_at(kind: TransportKind, address: tuple[str, int], timeout_s: float, *, again: bool) -> Rendezvous:
    """The rendezvous that this process hosts at an address, or found there: torchrun's agent may host the store.

    Hosts it ``again`` if it has given it up meanwhile. Raises a ``LaunchError`` if ``LIGHTNING_ASGD_SECRET`` has
    changed since: the servers of earlier jobs, which later ones use too, know the earlier secret only.
    """
    if address not in _hosted:
        again = again and not agent_hosts()
        _hosted[address] = kind.host_rendezvous(*address) if again else Rendezvous.connect(*address, timeout_s)
    found = _hosted[address]
    if found.secret != os.environ.get(SECRET_ENV):
        raise LaunchError(
            f"{SECRET_ENV} has changed since an earlier job of this process, whose servers run on and know the earlier "
            "secret only. Expected one secret for all jobs of a process. Set it before the first of them, leave it as "
            "it is afterwards, or start another process for a job with another secret."
        )
    return found


def agent_hosts() -> bool:
    """Whether torchrun's agent hosts the store at ``MASTER_PORT``."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def can_move(place: Surroundings) -> bool:
    """Whether other workers live on when worker 0's process or machine is lost; the same on all workers."""
    return place.num_nodes > 1 or (place.external and not place.by_hand)


def hosts_of_job() -> ServerHosts | None:
    """Which worker hosts the servers of this process's job; None before :meth:`keep_place`."""
    return _hosts


def own_rendezvous(
    kind: TransportKind, host: str, rank: int, first: tuple[str, int], *, leads: bool = False
) -> Rendezvous:
    """The rendezvous that this process hosts itself. It is made once, and kept.

    A worker that ``leads`` those of another machine than worker 0's has it at the same port as worker 0, if that is
    free: so a firewall need let through one port only.
    """
    global _own
    own = _own or (_hosted.get(first) if rank == 0 and not agent_hosts() else None)
    if own is None:
        allow_many_connections()
        port = first[1] if leads and kind.encrypted and resolve(first[0]) != host else 0
        with contextlib.suppress(LaunchError):
            own = kind.host_rendezvous(host, port) if port else None
        own = own or kind.host_rendezvous(host, 0)
        _hosted[own.address] = own
    _own = own
    return own


def keep_place(
    kind: TransportKind, host: str, rank: int, first: tuple[str, int], *, leads: bool = False
) -> ServerHosts:
    """Keep a rendezvous ready in this process, in case it is to host the servers one day."""
    global _hosts
    own = own_rendezvous(kind, host, rank, first, leads=leads)
    _hosts = ServerHosts(rank, own, first, may_host=rank_variables.main_process() is None)
    return _hosts


def point_to(hosts: ServerHosts, program: str) -> None:
    """Let processes that are started again know that this one hosts the servers."""
    global _signpost
    if _signpost is not None:
        _signpost.close()

    def where() -> Moved | None:
        if not hosts.hosting:
            return None
        chief = hosts.rank if hosts.chief in hosts.lost else hosts.chief  # until they have agreed on another one
        return Moved(hosts.mine.host, hosts.mine.port, hosts.rank, chief, program)

    _signpost = Signpost(hosts.first, where)


def release_port() -> None:
    """Stop serving at ``MASTER_PORT`` what torch cannot use: another strategy is about to host torch's store there."""
    global _own
    for address, rendezvous in list(_hosted.items()):
        if not rendezvous.serves_torch and str(address[1]) == os.environ.get("MASTER_PORT"):
            if rendezvous is _own:
                placed_servers.end_share()
                _own = None
            _hosted.pop(address).close()
