"""A job: its rendezvous, its servers, and the connection to them, which a process keeps between two sessions."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_asgd.core.calls.transport import Transport
from lightning_asgd.core.foundation.environment import joined
from lightning_asgd.core.foundation.errors import LaunchError, ServerLostError
from lightning_asgd.core.job import address as job_address
from lightning_asgd.core.job import exit_code, rank_variables, registry, supervisor
from lightning_asgd.core.job.address import Surroundings
from lightning_asgd.core.job.addresses import LOOPBACK, ServerAddress, interface_of, is_loopback, local_address_towards
from lightning_asgd.core.job.facts import check_facts, publish_facts, refused_in, telling_if_refused
from lightning_asgd.core.job.options import JobOptions
from lightning_asgd.core.job.rendezvous import Rendezvous
from lightning_asgd.core.server.process import ServerSettings
from lightning_asgd.hosting import placed_servers, returned_host
from lightning_asgd.hosting.lent_servers import servers_of_machine
from lightning_asgd.hosting.placed_servers import NodeServers
from lightning_asgd.hosting.returned_host import Arrival, Moved
from lightning_asgd.hosting.run_finder import RunFinder
from lightning_asgd.hosting.server_hosts import ServerHosts

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_REFUSED_S = 120.0  # as long as a worker waits for servers at the start
_ATTEMPT_S = 2.0  # to connect, after which the worker that is connected to may be lost
_FIRST_S = 25.0  # the same at first: what listens may be another program
_LOOK_S = 1.0  # to find out whether a server was replaced
STOP_S = 3.0  # for a worker to end after SIGTERM, or to say why it ends
_jobs = itertools.count()
_connected = False  # whether this process has been a worker
_transport: Transport | None = None  # kept from one call of the Trainer to the next
_inherited: list[Any] = []  # the parent's, of a forked process, which must not close it


def _after_fork() -> None:
    global _transport
    _inherited.append(_transport)
    _transport = None


os.register_at_fork(after_in_child=_after_fork)


def has_connected() -> bool:
    """Whether this process has been a worker."""
    return _connected


@atexit.register
def _close_transport() -> None:
    """After the fleet's own handler. A thread that completes futures of torch while Python ends aborts the process."""
    if _transport is not None:
        _transport.close()


class _HasMoved(LaunchError):
    """The job is elsewhere."""

    def __init__(self, where: Moved) -> None:
        super().__init__(f"The job has moved to {where.host}:{where.port}.")
        self.where = where


@dataclass
class TrainingJob:
    """What all processes of a job agree on. Copied into the workers, so it holds plain values only."""

    num_servers: int  # servers to start
    start_timeout_s: float  # seconds to wait for servers and workers
    hot_standby: bool = False  # whether to keep a standby server ready, so that a dead server is replaced at once
    may_move: bool = False  # whether another worker may host the servers if worker 0 is lost
    asked: str = registry.AUTO  # the transport that the user named, or ``"auto"``
    snapshot_every_s: float = 0.0  # seconds between two snapshots for another host; 0 for none
    # How many strategies were made before this one in this process; equal on all workers, which run the same program.
    number: int = field(default_factory=lambda: next(_jobs))
    rank: int = 0  # this process's
    nodes: int = 1  # of the job
    workers: int = 1
    launches: int = 0  # how often the Trainer was called with this strategy
    transport: str = "rpc"  # how messages are sent, once a job has begun or a run was found
    why: str = ""  # the reason for that transport
    address: tuple[str, int] | None = None  # ``(host, port)`` of the rendezvous, None before the first launch
    # Random; two jobs that use one address one after the other have two. None before the first launch.
    name: str | None = None
    interface: str = "lo"  # network interface for everything, ``"lo"`` on one machine
    spans: bool = False  # whether workers may be on other machines
    external: bool = False  # whether a user or an engine has started the workers, such as torchrun
    run_id: str = ""  # name of the elastic run that this process joins; empty for a job
    # Which worker hosts the servers, where another one can take over; None where the main process does.
    hosts: ServerHosts | None = None
    given: tuple[tuple[str, int], ...] = ()  # addresses of the hosts of the run
    finder: RunFinder | None = None  # where that run is served now; None in a job, and before the run was found
    program: str = ""  # tells the job from another one at the same address
    # This process until it has been connected, where it may have been started again; else None.
    arrival: Arrival | None = None
    server_machines: int = 1  # nodes among which the servers are divided; one once another worker hosts them
    lease_s: float = placed_servers.LEASE_S  # seconds that a node's servers live without the first node
    placed: frozenset[int] = frozenset()  # servers of the present session that run on other nodes than the first one

    @classmethod
    def of(cls, options: JobOptions) -> TrainingJob:
        """The job that a program's arguments ask for."""
        config = options.config
        writes = config.restorable and config.algorithm.keeps_state
        given, run_id = options.place
        return cls(
            options.num_servers,
            config.timeouts.start_s,
            config.restorable,
            config.restorable and not options.policy.abort,
            options.transport,
            config.snapshot_every_s if writes else 0.0,
            given=given,
            run_id=run_id,
            server_machines=config.server_machines,
            lease_s=placed_servers.lease_of(config.timeouts.silence_s, config.timeouts.start_s),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: libraries save a strategy together with a model."""
        return {**self.__dict__, "hosts": None, "finder": None}

    @property
    def attaches(self) -> bool:
        """Whether this process joins an elastic run."""
        return bool(self.run_id)

    @property
    def session(self) -> str:
        """Name of the present run of fit, validate, test or predict."""
        return self.run_id or f"{self.name}.{self._call}"

    @property
    def _call(self) -> str:
        """The present call of the Trainer, by the same text on all workers."""
        return f"{self.number}.{self.launches}"

    def begin(self, place: Surroundings, say: Callable[[str], None], *, is_main: bool) -> None:
        """Find or host the rendezvous. In the main process, start the servers, and say who could get in."""
        node = placed_servers.checked_node(self.server_machines, place.num_nodes, place.rank, place.node)
        # A worker that Lightning's launcher started on one machine has the address, and LOCAL_RANK as under torchrun.
        started_here = rank_variables.address() is not None or not place.external
        one_machine = place.num_nodes == 1 and started_here
        self.external = not started_here
        self.transport, self.why, kind = job_address.choose_transport(
            self.asked, one_machine=one_machine, say=say if is_main else None
        )
        kind.provide_secret(one_machine=one_machine)
        self.launches += 1
        self.rank, self.nodes, self.workers = place.rank, place.num_nodes, place.world_size
        several = place.world_size > 1
        can_move = several and job_address.can_move(place)
        hosts = job_address.hosts_of_job() if can_move else None
        starts = hosts is None
        if hosts is None:
            self.address = job_address.find_address(kind, place, is_main=is_main)
        else:
            hosts.begin_session()
            self.address, is_main = hosts.address, hosts.present == hosts.rank
        # Environments of others, such as Ray's, start workers on several machines and leave num_nodes at 1.
        self.spans = place.num_nodes > 1 or place.foreign
        here = local_address_towards(self.address[0]) if self.spans else LOOPBACK
        if self.spans:
            self.interface = interface_of(here)
        rank = place.rank
        if can_move and hosts is None and self.may_move:
            hosts = job_address.keep_place(kind, here, rank, self.address, leads=place.local_rank == 0)
        if hosts is not None:
            hosts.rank = rank
        # Once another worker hosts them, the session must know that worker 0 is gone.
        self.hosts = hosts if self.may_move or (hosts is not None and hosts.moved) else None
        self.program, self.arrival = returned_host.program_of(place.world_size), None
        if starts and self.hosts is not None and not job_address.agent_hosts():
            self.arrival = Arrival(rank, set(range(place.world_size)) - {rank}, self.program)
        if is_main:
            rendezvous = job_address.hosted_at(kind, self.address, self.start_timeout_s, again=hosts is not None)
            self._start_servers(rendezvous, several=several, gone={} if hosts is None else hosts.lost)
        elif 0 < node < self.server_machines and place.local_rank == 0:
            own = job_address.own_rendezvous(kind, here, rank, self.address, leads=True)
            servers, first = NodeServers(node, own, self.interface), self.address
            # As ordered where worker 0 hosts them; they end if another worker hosts them.
            placed_servers.run_share(servers, self.transport, lambda: first if hosts is None else hosts.address)

    def _start_servers(
        self, rendezvous: Rendezvous, *, several: bool, gone: Mapping[int, str], succeed: bool = False
    ) -> None:
        """Start the servers, which know that workers are ``gone``; they may ``succeed`` lost ones."""
        publish_facts(rendezvous, call=self._call, workers=self.workers, num_nodes=self.nodes)
        moves, every_s = self.hosts is not None, self.snapshot_every_s if several else 0.0
        if succeed or (self.hosts is not None and self.hosts.moved):
            self.server_machines = 1
        if not succeed or self.name is None:
            self.name = rendezvous.announce_job()
        interface = self.interface
        if self.spans:
            interface = registry.kind_of(self.transport).open_to_others(rendezvous, interface)
        settings = ServerSettings(
            interface, self.transport, self.name, snapshot_every_s=every_s, moves=moves, watches=moves or self.external
        )
        number = len(servers_of_machine(self.num_servers, self.server_machines, 0))
        overseer = supervisor.ensure(number, rendezvous, settings, succeed=succeed)
        overseer.hot_standby = self.hot_standby and several
        if self.hosts is not None:
            overseer.has_returned = self.hosts.has_returned
        for rank, why in gone.items():
            overseer.report_exit("", rank, why)
        if self.arrival is None or succeed:
            self._announce(rendezvous, overseer)

    def _announce(self, rendezvous: Rendezvous, overseer: supervisor.Supervisor) -> None:
        rendezvous.put("job", self.name)
        keys = placed_servers.announce_servers(
            overseer, self.num_servers, self.server_machines, self.hosts, self.lease_s
        )
        rendezvous.announce_session(self.session, self.transport, keys)

    def _begin_or_follow(self, arrival: Arrival) -> None:
        """Announce the servers that worker 0 has started, unless the job has moved while it was lost."""
        overseer = supervisor.ensure_watch()
        with self._rendezvous() as rendezvous:
            moved = arrival.await_moved(rendezvous)
            if moved is None:
                self._announce(rendezvous, overseer)
            else:
                overseer.end_servers()
                self._follow(moved)

    def find_run(self) -> None:
        """Find the servers of the run, which are running already."""
        if not self.given:
            raise LaunchError("No address of the servers was given.")
        self.transport, self.why, _ = job_address.choose_transport(self.asked, one_machine=False, say=log.debug)
        self.finder = self.finder or RunFinder(self.given)
        self.address = self.finder.find(self.start_timeout_s)
        rendezvous, served, keys = Rendezvous.find_run(*self.address, self.start_timeout_s)
        with rendezvous, telling_if_refused(rendezvous):
            check_facts(rendezvous)
        self.interface = interface_of(local_address_towards(self.address[0]))
        mine = {"run_id": self.run_id, "transport": self.transport}
        if served != mine:
            raise LaunchError(
                f"{joined(*self.address)} serves run {served['run_id']!r} with transport={served['transport']!r}. "
                f"Expected run {self.run_id!r} and transport={self.transport!r}, as given to this worker."
            )
        self.num_servers = len(keys)

    def connect(self) -> Transport:
        """Wait for the session's servers and connect to them; the transport is kept while the servers stay the same."""
        global _transport, _connected
        if self.arrival is not None and self.arrival.rank == 0:
            self._begin_or_follow(self.arrival)
        try:
            addresses = self._find_servers()
        except _HasMoved as error:
            self._follow(error.where)
            addresses = self._find_servers()
        self.arrival = None
        if _transport is None or _transport.addresses != tuple(addresses) or not _transport.alive:
            if _transport is not None:
                _transport.close()
            about = self.interface, self._may_be_refused_s(addresses)
            _transport = registry.kind_of(self.transport).connect(addresses, *about)
        _connected = True
        return _transport

    def _may_be_refused_s(self, addresses: Sequence[str]) -> float:
        """For how long a machine may refuse connections before its process is taken for lost."""
        # Zero but at the end of a tunnel, which may be restarted, and in an elastic run with one host.
        way = ServerAddress.of(addresses[0]) if addresses[0].startswith("tcp://") else None
        tunnel = way is not None and way.number > 0 and is_loopback(way.host)  # the servers are on another machine
        if tunnel and self.hosts is not None:
            raise LaunchError(
                f"The servers run on another machine than this, and a tunnel leads there from {way}. In this job "
                "another worker would host them if worker 0 was lost, and would not be found through the tunnel. "
                "Expected on_worker_failure='abort' on all machines, an elastic run, or a MASTER_ADDR "
                "that is no loopback address."
            )
        waits = self.attaches and not (self.finder is not None and self.finder.several)
        return _REFUSED_S if tunnel or waits else 0.0

    def _find_servers(self) -> list[str]:
        """Wait for the addresses of the session's servers. Raises :class:`_HasMoved` if these are elsewhere."""
        arrival = self.arrival
        with self._reach_host() as rendezvous:

            def check() -> None:
                if arrival is not None and (moved := arrival.follows(rendezvous)) is not None:
                    raise _HasMoved(moved)

            def begins() -> None:
                moved = self.hosts is not None and self.hosts.moved
                starts = self.rank == 0 and not (_connected or self.attaches or moved)
                if starts and (found := refused_in(rendezvous)) is not None and (found[0] or 0) < self.workers:
                    raise LaunchError(found[1])  # the others are awaited, and the servers take seconds to start

            if arrival is not None:
                arrival.announce(rendezvous)
                check()
            with telling_if_refused(rendezvous, None if self.attaches else self.rank):
                if not self.attaches:
                    self.name = rendezvous.get("job", "The main process", self.start_timeout_s, check, kind=str)
                    # At torchrun's agent they may be of an attempt with other workers.
                    check_facts(rendezvous, "" if job_address.agent_hosts() else self._call, self.workers)
                keys = rendezvous.session(self.session, self.transport, self.start_timeout_s, check)
            begins()
            self.placed = frozenset(index for index, key in enumerate(keys) if placed_servers.node_of(key))
            found = []
            for index, key in enumerate(keys):
                with placed_servers.node_named(index, key):
                    found.append(rendezvous.server(index, key, self.start_timeout_s, check=begins))
            return found

    def _follow(self, moved: Moved) -> None:
        """Go where the servers are: this process has been started again, and another worker hosts them since."""
        self.arrival = None
        if self.hosts is not None:
            log.warning("Worker %d hosts the servers since their host was lost. This process joins them.", moved.rank)
            self.address = moved.host, moved.port
            self.hosts.follow(moved.rank, self.address, moved.chief)

    def store(self) -> Any:
        """A key-value store that all workers of the present session reach."""
        return self._rendezvous().shared(f"session/{self.session}/")

    def _rendezvous(self, timeout_s: float | None = None) -> Rendezvous:
        if self.address is None:
            raise LaunchError("The strategy was not launched by a Trainer. Expected Trainer(strategy=...).fit(...).")
        wait_s = timeout_s or self.start_timeout_s
        hint = f"MASTER_ADDR and MASTER_PORT name it on every machine. {rank_variables.listed()}".rstrip(". ")
        about: Any = {"elsewhere": self.attaches, "transport": self.transport, "first": self._is_first}
        return Rendezvous.connect(*self.address, wait_s, hint, **about)

    @property
    def _is_first(self) -> bool:
        """Whether this machine has not reached the job yet."""
        return self.spans and self.name is None and not self.attaches

    def _reach_host(self) -> Rendezvous:
        """Connect to where the servers are announced, wherever that is: their host may be lost meanwhile."""
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            if self.hosts is not None:
                self.address = self.hosts.locate(self._take_over, self.start_timeout_s)
            elif self.finder is not None and self.finder.several:
                self.address = self.finder.locate(self.start_timeout_s)
            try:
                wait_s = min(_FIRST_S if self._is_first else _ATTEMPT_S, self.start_timeout_s)
                return self._rendezvous(wait_s if self._may_be_elsewhere else None)
            except LaunchError as error:
                if not self._may_be_elsewhere or (error.final and self.name is None) or time.monotonic() > deadline:
                    raise

    @property
    def _may_be_elsewhere(self) -> bool:
        """Whether another process may host the servers next."""
        return self.hosts is not None or (self.finder is not None and self.finder.several)

    def successor(self, server: int) -> str:
        """Wait for the replacement of a lost server that this process was connected to. Returns its address."""
        lost, hosts = f"Server {server} is lost and no replacement has started", self.hosts
        transport = _transport
        if self.address is None or transport is None:
            raise ServerLostError(f"{lost}: no job was launched.")
        before, until = transport.addresses[server], time.monotonic() + self.start_timeout_s

        def check() -> None:
            nonlocal until
            if tended:
                until = time.monotonic() + self.start_timeout_s
            if hosts is not None:
                hosts.check_host(self.name or "")
            if self.finder is not None and not self.finder.follows(there):
                raise LaunchError("The servers of the run have another host now.")

        tended = False  # as of a run whose driver waits for a replacement as long as that takes
        while True:
            address = self.address
            try:
                with self._reach_host() as there:
                    rendezvous = there
                    address, tended = rendezvous.address, rendezvous.tended
                    keys = rendezvous.session(self.session, self.transport, self.start_timeout_s, check)
                    return rendezvous.server(server, keys[server], self.start_timeout_s, before, check)
            except RuntimeError as error:
                if self.attaches and time.monotonic() < until:
                    time.sleep(_RETRY_S)  # `serve` was stopped after its servers, and is started again
                    continue
                # Else the host was lost meanwhile, and another thread may have found the next one already.
                if hosts is None or hosts.gave_up or (hosts.address == address and not hosts.is_lost):
                    raise ServerLostError(supervisor.with_last_output(f"{lost}: {error}")) from error

    def replaced_among(self, servers: Sequence[int]) -> list[int]:
        """Servers in whose place others serve already than those that this process is connected to."""
        found: list[int] = []
        connected = dict(enumerate(() if _transport is None else _transport.addresses))
        with contextlib.suppress(RuntimeError), self._rendezvous(_LOOK_S) as there:
            keys = dict(enumerate(there.session(self.session, self.transport, 0.0)))
            for server in set(servers) & keys.keys() & connected.keys():
                with contextlib.suppress(RuntimeError):  # it is starting
                    if there.server(server, keys[server], 0.0) != connected[server]:
                        found.append(server)
        return found

    def look_for_host(self) -> bool:
        """Look once for another worker that hosts the servers; whether there is one."""
        return self.hosts is not None and self.hosts.is_lost and self.hosts.move(self._take_over)

    def _take_over(self, rendezvous: Rendezvous, gone: Mapping[int, str]) -> None:
        rank, why = list(gone.items())[-1]
        log.warning("Worker %d is lost: %s. This process hosts the servers from now on.", rank, why)
        placed_servers.end_share(wait=False)  # what runs here of the servers that end with the host
        self._start_servers(rendezvous, several=True, gone=gone, succeed=True)
        if self.hosts is not None and not job_address.agent_hosts():
            job_address.point_to(self.hosts, self.program)

    def note_failure(self, rank: int, *, excused: bool) -> None:
        """Report to the main process that a worker fails in a fit that continues, and whether that is no failure."""
        if self.address is not None and not self.attaches and (rank or rank_variables.main_process() is not None):
            with contextlib.suppress(RuntimeError), Rendezvous.connect(*self.address, STOP_S) as rendezvous:
                rendezvous.put(exit_code.excuse_of(os.getpid()), excused)  # unless the main process is gone
