"""``lightning-asgd doctor``: this machine, and problems that a job would have on it."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from lightning_asgd.cli import machine_checks as checks
from lightning_asgd.cli.machine_checks import NOTE, OK, PROBLEM, WARNING, Check, refused
from lightning_asgd.core.foundation.environment import SECRET_ENV, joined, server_address
from lightning_asgd.core.foundation.errors import ASGDError
from lightning_asgd.core.foundation.validation import whole
from lightning_asgd.features import TRANSPORTS

_WIDTH = 80
_START_S = 60.0
_REACH_S = 3.0
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: the way there is the way to other machines
_PIECE = 16 << 20  # bytes of shared memory to try


def doctor(
    *, num_nodes: int | None = None, transport: Literal["auto", "rpc", "zmq"] = "auto", job: str | None = None
) -> int:
    """Check this machine and list problems.

    Run it when something does not start, and put its output into a bug report. It shows versions, devices, memory,
    network, ports, shared memory and the environment; secrets are never shown. The exit code is 1 if there is a
    problem.

    Args:
        num_nodes: machines of the job. The default is what the environment says, else 1.
        transport: the job's transport, as for ASGDStrategy.
        job: address of a job or run that has started on another machine, as "host:port": MASTER_ADDR and MASTER_PORT,
            or what `lightning-asgd serve` prints. Shows first what this machine and that one disagree about.
    """
    nodes = checks.number_of_machines(os.environ) if num_nodes is None else whole("num_nodes", num_nodes)
    found: list[Check] = []
    place = None if job is None else server_address(job, "job")
    compared = [] if place is None else [("Job", _job(*place, None if num_nodes is None else nodes))]
    for line in examine(nodes, transport, found, values=True, more=compared):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()  # some checks take seconds
    return int(any(check.state == PROBLEM for check in found))


def examine(
    nodes: int,
    transport: str,
    found: list[Check],
    *,
    values: bool,
    more: Iterable[tuple[str, Iterable[Check]]] = (),
) -> Iterator[str]:
    """Make all checks, after ``more``, into ``found``. Yields lines of 80 columns; ``values``: of variables, too."""
    groups = {
        **dict(more),
        "Versions": _versions(),
        "Machine": _machine(),
        "Devices": _devices(),
        "Network": _network(nodes),
        "Transport": _transport(nodes, transport),
        "Environment": checks.settings(os.environ, values=values),
    }
    for heading, group in groups.items():
        yield heading
        for check in _despite_errors(heading, group):
            found.append(check)
            yield from _wrapped(f"  {'' if check.state == OK else check.state:8}{check.name:19} ", check.text)
    any_problem = any(check.state == PROBLEM for check in found)
    where = "one machine" if nodes == 1 else f"{nodes} machines"
    yield f"{'Problems' if any_problem else 'No problems'} for a job on {where} with transport={transport!r}"
    for check in [each for state in (PROBLEM, WARNING, NOTE) for each in found if each.state == state]:
        yield from _wrapped(f"  {check.state:8}", f"{check.name}: {check.text.rstrip('.')}. {check.advice}")


def _despite_errors(heading: str, group: Iterable[Check]) -> Iterator[Check]:
    """The checks; where a machine lacks something that they themselves need, the error in place of the rest."""
    try:
        yield from group
    except Exception as error:  # of any kind, in a broken installation
        advice = "Install what is missing, or fix what comes before."
        yield Check(heading.lower(), PROBLEM, f"cannot be examined further: {error!r}.", advice)


def _wrapped(before: str, text: str) -> list[str]:
    indent = " " * len(before)
    return textwrap.wrap(text, _WIDTH, initial_indent=before, subsequent_indent=indent, break_on_hyphens=False)


def _job(host: str, port: int, nodes: int | None) -> Iterator[Check]:
    """Compare this machine with the host of a job."""
    from lightning_asgd.core.job.entry_store import CLOCK_KEY
    from lightning_asgd.core.job.facts import FACTS_KEY, facts
    from lightning_asgd.core.job.rendezvous import Rendezvous

    try:
        with Rendezvous.connect(host, port, _REACH_S, "--job names its address", elsewhere=True) as there:
            asked = time.time()
            clock, theirs = there.peek(CLOCK_KEY, float), there.peek(FACTS_KEY, dict)
            ahead_s = None if clock is None else clock - (asked + time.time()) / 2
    except RuntimeError as error:  # also of the connection
        yield refused("job", error)
        return
    if theirs is None:
        why = f"it has an earlier release, another {SECRET_ENV}, or no job yet"
        text = f"{joined(host, port)} publishes no versions: {why}."
        yield Check("job", PROBLEM, text, "Compare both on the two machines.")
        return
    yield Check("secret", OK, f"{SECRET_ENV} is the job's, or none is set on either machine")
    yield from checks.check_job(theirs, facts(), nodes)
    yield checks.check_clocks(ahead_s)


def _versions() -> Iterator[Check]:
    from lightning_asgd.core.lightning.class_trees import MALICIOUS, TREES

    yield checks.check_system(platform.platform(), sys.platform)
    about = metadata.metadata("lightning-asgd")
    yield checks.check_python(platform.python_version(), about["Requires-Python"] or "")
    yield Check("lightning-asgd", OK, about["Version"])
    installed = {str(d.metadata["Name"]).lower().replace("_", "-"): d.version for d in metadata.distributions()}
    trees = {tree.distribution: tree for tree in TREES}
    required = metadata.requires("lightning-asgd") or []
    for check in checks.check_packages(installed, required, [*trees], MALICIOUS):
        # Not what is malicious: it runs when it is imported.
        usable = check.state == OK and check.name in trees
        yield _with_names(check, trees[check.name]) if usable else check


def _with_names(check: Check, tree: Any) -> Check:
    """The same for one of Lightning's packages, if it can be imported and has the names that this package uses."""
    from packaging.version import Version

    from lightning_asgd.core.lightning import name_check, private_names

    said: list[str] = []
    try:
        importlib.import_module(tree.package)
        name_check.check_tree(tree, said.append)
        if Version(tree.version) > Version(private_names.LATEST):
            said.append(f"{tree.version} is newer than {private_names.LATEST}, the latest that was tested")
    except ASGDError as error:
        return refused(check.name, error)
    except Exception as error:  # of any kind, where an installation is broken
        return Check(check.name, PROBLEM, f"cannot be imported: {error!r}", f"Install {check.name} again.")
    if said:
        return Check(check.name, WARNING, "; ".join(said), f"Install {check.name} {private_names.LATEST}.")
    return check._replace(text=f"{check.text}, compatible")


def _machine() -> Iterator[Check]:
    import psutil

    groups = Path("/proc/self/cgroup")
    quota, limit = checks.container_limits(Path("/sys/fs/cgroup"), groups.read_text() if groups.is_file() else "")
    cores, memory = os.cpu_count() or 1, psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    yield checks.check_cores(cores, usable, quota)
    yield checks.check_memory(memory.total, memory.available, limit)
    with contextlib.suppress(ImportError):  # not Unix
        import resource

        yield checks.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield _started_process()
    yield checks.check_clock(datetime.now().astimezone())


def _devices() -> Iterator[Check]:
    import torch

    from lightning_asgd.core.calls import shared_memory
    from lightning_asgd.core.foundation.layout import Role

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "" if device is None else device.type
    name = getattr(torch.get_device_module(kind) if kind else None, "get_device_name", lambda _: kind)
    yield checks.check_accelerator(kind, [name(i) for i in range(torch.accelerator.device_count() if kind else 0)])
    block = shared_memory.create(((Role.PARAMETER, "float32", _PIECE // 4),))
    if block is not None:
        block.tensors[0].fill_(1.0)  # else no page is mapped
        block.close()
    shm = Path("/dev/shm")
    yield from checks.check_shared_memory(block is not None, shutil.disk_usage(shm).free if shm.is_dir() else None)


def _started_process() -> Check:
    """Whether a process can be started that imports this package."""
    from lightning_asgd.core.job.server_handle import child_environment

    command = [sys.executable, "-c", "import lightning_asgd.core.job.reaper"]
    try:
        subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=_START_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip().rpartition("\n")[2]
        return Check("processes", PROBLEM, f"{command} failed: {said}", "Look at the limit of processes (ulimit -u).")
    return Check("processes", OK, "can be started")


def _network(nodes: int) -> Iterator[Check]:
    import psutil

    from lightning_asgd.core.job import address as job_address
    from lightning_asgd.core.job.addresses import interface_of, listens, local_address_towards, resolve

    found = {
        name: [
            str(each.address)
            for each in addresses
            if each.family in (socket.AF_INET, socket.AF_INET6) and not each.address.startswith("fe80:")
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }
    yield checks.check_interfaces(found, {name for name, each in psutil.net_if_stats().items() if each.isup})
    own = {address for addresses in found.values() for address in addresses}
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    launched = any(name in os.environ for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"))
    place = checks.check_master_address(host, own, resolve, needed=nodes > 1 and not launched)
    try:
        address = local_address_towards(host if host and place.state == OK else _ELSEWHERE)
        yield Check("address for others", OK, f"{address} ({interface_of(address)}), host {socket.gethostname()}")
    except ASGDError as error:
        yield refused("address for others", error, PROBLEM if nodes > 1 else WARNING)
    yield place
    try:
        job_address.check_port(port, nodes, by_hand=not launched)
    except ASGDError as error:
        yield refused("MASTER_PORT", error)
        return
    if port is None or (host and place.state != OK):
        yield Check("MASTER_PORT", OK, port or "not set")
    elif place.text.endswith("another machine"):
        there = {True: "a process listens there", False: "no process listens there yet", None: "does not answer"}
        yield Check("MASTER_PORT", OK, f"{port}: {there[listens(str(host), int(port))]}")
    else:
        by_agent = job_address.agent_hosts()
        yield checks.check_free_port(int(port), lambda port: _bind(host or "0.0.0.0", port), _holder, by_agent=by_agent)


def _bind(host: str, port: int) -> OSError | None:
    """The error of listening on an address, if any."""
    from lightning_asgd.core.job.addresses import listen

    try:
        listen(host, port).close()
    except OSError as error:
        return error
    return None


def _holder(port: int) -> str:
    """The process that listens on a port; empty if the system does not say."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()}, process {each.pid}"
    return ""


def _transport(nodes: int, asked: str) -> Iterator[Check]:
    from lightning_asgd.core.algorithms.config import SECRET_ENV
    from lightning_asgd.core.job import registry
    from lightning_asgd.core.job import secret as job_secret

    try:
        job_secret.check()
    except ASGDError as error:
        yield refused("secret", error, PROBLEM)
        return
    for one_machine, where in ((True, "on one machine"), (False, "on several")):
        name, why, who = registry.choose(asked, one_machine=one_machine)
        open_to_others = nodes > 1 and not one_machine and not registry.kind_of(name).encrypted
        yield Check(where, WARNING if open_to_others else OK, f"{name} ({why})", f"{name} {who}")
    used = registry.choose(asked, one_machine=nodes == 1)[0]
    for name in TRANSPORTS:
        kind = registry.kind_of(name)
        several = nodes > 1 or name != used  # what is not used is looked at for several machines
        try:
            kind.check_available()
            if kind.encrypted and (several or SECRET_ENV in os.environ):  # one machine makes its own
                kind.provide_secret(one_machine=not several)
        except ASGDError as error:
            found = refused(name, error, PROBLEM if name == used else NOTE)
            if open_to_others:  # whose check says how to make a secret
                found = found._replace(advice=found.advice.replace(job_secret.HAND_OUT, "See above."))
            yield found._replace(text=f"on several machines: {found.text}") if several else found
        else:
            strong = f", and {SECRET_ENV} is long enough" if kind.encrypted and job_secret.given() else ""
            yield Check(name, OK, f"works here{strong}")
