"""What ``lightning-asgd doctor`` makes of the facts about a machine. Imports neither torch nor Lightning."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from lightning_asgd.cli.console_tables import in_bytes
from lightning_asgd.core.job.rank_variables import RANK_VARIABLES

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
"""States: a job would fail where there is a problem, and what a note is about if it is asked for."""

_NEEDED = ("torch", "psutil")
_EXTRAS = ("pyzmq", "wandb", "rich", "matplotlib")

_LEAST_MEMORY = 2e9  # bytes: main process, worker and server with torch imported take 1.2 GB
_LEAST_SHM = 128 << 20  # bytes: containers get 64 MB by default
_LEAST_FILES = 1024
_APART_S = 1.0  # between two clocks
_RELEASED = 2025  # no clock that is right shows an earlier year

_SLURM = ("JOB_ID", "NNODES", "NTASKS", "NODEID", "PROCID", "LOCALID", "JOB_NODELIST", "CPUS_PER_TASK")
_VARIABLES = {
    "ranks": (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"),
    "torchrun": ("GROUP_RANK", "ROLE_RANK", *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "USE_AGENT_STORE"))),
    "SLURM": tuple(f"SLURM_{name}" for name in _SLURM),
    "devices, threads": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
}
_OWN = "LIGHTNING_ASGD_"
PRIVATE = ("SECRET", "TOKEN", "PASSWORD", "KEY", "CREDENTIAL")
"""Words in the names of environment variables whose values are secret."""


class Check(NamedTuple):
    """One thing about a machine, and what to do about it if it is not in order."""

    name: str
    state: str
    text: str
    advice: str = ""


def refused(name: str, error: RuntimeError, state: str = PROBLEM) -> Check:
    """What an error says: up to ``Expected``, and from there on what to do."""
    text, expected, advice = str(error).partition(" Expected ")
    return Check(name, state, text, f"{expected}{advice}".strip())


def settings(environment: Mapping[str, str], *, values: bool) -> list[Check]:
    """The environment variables that say how a job was started, without secrets; only their names if not ``values``."""

    def shown(names: Collection[str]) -> str:
        given = [name for name in names if name in environment]
        secret = {name for name in given if any(word in name for word in PRIVATE)}
        whole = {name: f"{name} (set)" if name in secret else f"{name}={environment[name][:80]}" for name in given}
        return " ".join(whole.values() if values else given) or "none"

    found = [Check(about, OK, shown(names)) for about, names in _VARIABLES.items()]
    found.append(Check(f"{_OWN}*", OK, shown(sorted(name for name in environment if name.startswith(_OWN)))))
    ranks = [name for name in ("RANK", "LOCAL_RANK") if name in environment]
    if ranks and not any(name.startswith(("TORCHELASTIC_", "SLURM_")) for name in environment):
        advice = f"Unless a launcher has set them on purpose: unset {' '.join(ranks)}."
        text = "Neither torchrun nor SLURM set the rank: a script started here takes itself for a worker of a job."
        found.append(Check("rank by hand", WARNING, text, advice))
    return found


def number_of_machines(environment: Mapping[str, str]) -> int:
    """Machines of the job that this environment was made for; 1 if it does not say."""

    def number(name: str) -> int:
        return int(environment.get(name) or 0) if environment.get(name, "").isdecimal() else 0

    of_ranks = number("WORLD_SIZE") // (number("LOCAL_WORLD_SIZE") or number("WORLD_SIZE") or 1)
    return max(1, number("NNODES"), number("SLURM_NNODES"), of_ranks, number("NODE_RANK") + 1)


# ---------------------------------------------------------------------- versions


def check_system(system: str, platform: str) -> Check:
    """The operating system."""
    if platform == "win32":
        return Check("system", PROBLEM, f"{system} is not supported. Expected Linux.", "Use Linux, WSL or a container.")
    return Check("system", OK, system)


def check_python(version: str, bounds: str) -> Check:
    """The interpreter's version, by the bounds of pyproject.toml."""
    return _within("Python", version, bounds, "Install another Python, and this package for it.")


def check_packages(
    installed: Mapping[str, str], requirements: Sequence[str], either: Collection[str], malicious: Collection[str]
) -> list[Check]:
    """The versions of what this package needs or can use, by the bounds of pyproject.toml.

    It needs one of ``either``, two names of the same releases, of which some are ``malicious``.
    """
    from packaging.requirements import Requirement  # with Lightning

    bounds = {each.name: str(each.specifier) for each in reversed([*map(Requirement, requirements)])}
    bounds |= dict.fromkeys(either, next(bounds[name] for name in either if name in bounds))
    found = []
    has_one = any(name in installed for name in either)
    for name in (*_NEEDED, *either, *_EXTRAS):
        need = f'pip install "{name}{bounds[name]}"'
        if name in either and installed.get(name) in malicious:
            advice = "Uninstall it and replace the passwords and keys that this machine can read: its code has run."
            found.append(Check(name, PROBLEM, f"{installed[name]} is a malicious release.", advice))
        elif name in installed:
            found.append(_within(name, installed[name], bounds[name], need))
        elif name in _EXTRAS:
            found.append(Check(name, OK, f"not installed; {need} adds it"))
        elif name in _NEEDED or not has_one:
            found.append(Check(name, PROBLEM, "not installed", need))
    return found


def _within(name: str, version: str, bounds: str, advice: str) -> Check:
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(bounds).contains(version, prereleases=True):
        return Check(name, OK, f"{version}, supported ({bounds or 'all'})")
    return Check(name, PROBLEM, f"{version} is not supported. Expected {bounds}.", advice)


def check_job(theirs: Mapping[str, Any], mine: Mapping[str, Any], nodes: int | None) -> Iterator[Check]:
    """Versions here and at the host of a job; and, if given, ``nodes`` compared with the job's ``num_nodes``."""
    for name in mine:
        if name not in theirs:
            continue
        here, there = str(mine[name]), str(theirs[name])
        if _comparable(name, here) == _comparable(name, there):
            yield Check(name, OK, f"{here} here, {there} there")
        elif name in ("protocol", "lightning-asgd"):
            advice = "Install the same version of lightning-asgd on every machine."
            yield Check(name, PROBLEM, f"{here} here, {there} there.", advice)
        else:
            yield Check(name, WARNING, f"{here} here, {there} there.", "Install the same version on every machine.")
    if "num_nodes" in theirs:
        there = f"num_nodes={theirs['num_nodes']} and {theirs.get('workers')} workers there"
        if nodes is None or nodes == theirs["num_nodes"]:
            yield Check("num_nodes", OK, f"{there}{'' if nodes is None else f', num_nodes={nodes} here'}")
        else:
            advice = "Pass the same num_nodes and devices to the Trainer on every machine."
            yield Check("num_nodes", PROBLEM, f"num_nodes={nodes} here, {there}.", advice)


def _comparable(name: str, version: str) -> str:
    """Without the build, such as ``+cu128``; of Python's the first two numbers."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version.partition("+")[0]


def check_clocks(ahead_s: float | None) -> Check:
    """The clock of a job's host beside this machine's."""
    if ahead_s is None:
        return Check("clock there", OK, "not known: the job has transport='rpc'")
    text = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this one"
    if abs(ahead_s) > _APART_S:
        return Check("clock there", WARNING, text, "Synchronise both clocks (NTP): else their log lines are unordered.")
    return Check("clock there", OK, text)


# ---------------------------------------------------------------------- machine


def container_limits(root: Path, groups: str) -> tuple[float | None, float | None]:
    """Cores, and bytes of memory, that control groups allow: ``/sys/fs/cgroup`` and ``/proc/self/cgroup``."""
    cores, memory = list[float](), list[float]()
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        folder = root / controllers / path.strip("/")  # version 1 has a folder per controller
        for each in (folder, *folder.parents):
            quota = _numbers(each, "cpu.max") or _numbers(each, "cpu.cfs_quota_us", "cpu.cfs_period_us")
            if len(quota) == 2:
                cores.append(quota[0] / quota[1])
            memory += _numbers(each, "memory.max") or _numbers(each, "memory.limit_in_bytes")
            if each == root:
                break
    return min(cores, default=None), min(memory, default=None)


def _numbers(folder: Path, *files: str) -> list[int]:
    """The whole numbers in files; where there is no limit, they hold ``max`` or ``-1``."""
    words = [word for file in files if (folder / file).is_file() for word in (folder / file).read_text().split()]
    return [int(word) for word in words if word.isdecimal()]


def check_cores(cores: int, usable: int, quota: float | None) -> Check:
    """CPU cores, and how many of them this process may use."""
    limit = "" if quota is None else f", {quota:g} by the container's limit"
    return Check("CPU cores", OK, f"{cores}, {usable} for this process{limit}")


def check_memory(total: float, available: float, limit: float | None) -> Check:
    """Memory, and how much of it is left."""
    within = "" if limit is None or limit >= total else f", {in_bytes(limit)} by the container's limit"
    text = f"{in_bytes(total)}{within}; {in_bytes(available)} available"
    if min(available, limit or available) < _LEAST_MEMORY:
        return Check("memory", WARNING, text, "Close programs, or raise the limit: torch alone takes 0.4 GB a process.")
    return Check("memory", OK, text)


def check_accelerator(kind: str, names: Sequence[str]) -> Check:
    """The devices that torch sees."""
    if kind == "mps":
        text = 'mps. Lightning starts no workers on MPS, so accelerator="mps" and "auto" are refused for a job.'
        advice = 'Pass accelerator="cpu", or join an elastic run: `lightning-asgd serve`, run=..., devices=1.'
        return Check("accelerators", PROBLEM, text, advice)
    text = f"{len(names)} {kind}: {', '.join(names)}" if names else "none, training uses CPUs"
    return Check("accelerators", OK, text)


def check_shared_memory(mapped: bool, free: float | None) -> list[Check]:
    """Whether a block could be mapped, and what is free in ``/dev/shm``."""
    advice = "Training works, slower on one machine. Allow memfd_create and /proc/PID/fd in the container."
    ours = Check("shared memory", OK, "available: workers and servers of a machine share weights")
    if not mapped:
        ours = Check("shared memory", WARNING, "not available: weights are sent by value", advice)
    if free is None:
        return [ours, Check("/dev/shm", WARNING, "is not there", "Use num_workers=0 in data loaders, or mount it.")]
    text = f"{in_bytes(free)} free, for batches of data loaders (A-SGD itself needs none)"
    if free < _LEAST_SHM:
        advice = "Use num_workers=0 in data loaders, or start the container with --shm-size=1g or --ipc=host."
        return [ours, Check("/dev/shm", WARNING, text, advice)]
    return [ours, Check("/dev/shm", OK, text)]


def check_open_files(soft: int, hard: int) -> Check:
    """The limit of open files, which servers raise to the hard limit."""
    text = f"{soft} soft, {hard} hard (servers use the hard limit)"
    if 0 <= hard < _LEAST_FILES:
        return Check("open files", WARNING, text, "Raise it (ulimit -Hn): each worker takes several at a server.")
    return Check("open files", OK, text)


def check_clock(now: datetime) -> Check:
    """The clock, by which logs of several machines are put in order."""
    text = f"{now:%Y-%m-%d %H:%M:%S %z}"
    if now.year < _RELEASED:
        advice = "Set it (NTP): logs of several machines are unordered."
        return Check("clock", WARNING, f"{text} is in the past.", advice)
    return Check("clock", OK, text)


# ---------------------------------------------------------------------- network


def check_interfaces(addresses: Mapping[str, Sequence[str]], up: Collection[str]) -> Check:
    """The network interfaces that have addresses."""
    shown = [f"{n} {', '.join(each)}{'' if n in up else ' (down)'}" for n, each in addresses.items() if each]
    advice = "Bring the loopback interface up: ip link set lo up."
    return Check("interfaces", OK, "; ".join(shown)) if shown else Check("interfaces", PROBLEM, "none", advice)


def check_master_address(
    given: str | None, own: Collection[str], resolve: Callable[[str], str], *, needed: bool
) -> Check:
    """Whether the machines of a job can find the first one; ``needed``: no launcher says where that is."""
    name = "MASTER_ADDR"
    if given is None:
        text, advice = "not set", "Set it to an address of the first machine, the same on all machines."
        lacks = Check(name, PROBLEM, f"{text}: other machines cannot find node 0.", advice)
        return lacks if needed else Check(name, OK, text)
    try:
        address = resolve(given)
    except OSError as error:
        advice = "Set it to an address of the first machine, or have the name resolved (DNS, /etc/hosts)."
        return Check(name, PROBLEM, f"{given} cannot be resolved: {error}", advice)
    shown = given if given == address else f"{given} is {address}"
    if address.startswith("127.") or address == "::1":
        advice = "Set it to an address of the network between the machines; see /etc/hosts."
        text = f"{shown}, which no other machine can reach"
        return Check(name, PROBLEM, text, advice) if needed else Check(name, OK, f"{shown}, on this machine only")
    return Check(name, OK, f"{shown}, {'this machine' if address in own else 'another machine'}")


def check_free_port(
    port: int, bind: Callable[[int], OSError | None], holder: Callable[[int], str], *, by_agent: bool
) -> Check:
    """Whether the main process could listen on a port of this machine; ``by_agent``: torchrun listens there."""
    error, name = bind(port), "MASTER_PORT"
    if error is None:
        return Check(name, OK, f"{port} is free")
    if isinstance(error, PermissionError):
        text = f"this user may not listen on port {port}: {error.strerror}."
        return Check(name, PROBLEM, text, "Choose a port above 1023.")
    if error.errno != errno.EADDRINUSE:
        return Check(name, PROBLEM, f"{port} cannot be listened on: {error.strerror}.", "Check MASTER_ADDR.")
    who = holder(port) or "a process that this user may not see"
    if by_agent:
        return Check(name, OK, f"{port} is taken by {who}; torchrun's agent is expected there")
    return Check(name, PROBLEM, f"{port} is taken by {who}.", "End that process, or choose another port.")
