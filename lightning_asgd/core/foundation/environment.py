"""The environment variables that users set, and the address of a run. Imports no torch: a health check is cheap."""

from __future__ import annotations

from lightning_asgd.core.foundation.errors import ConfigurationError

SECRET_ENV = "LIGHTNING_ASGD_SECRET"
"""The secret of ``transport="zmq"``."""

RUN_ENV = "LIGHTNING_ASGD_RUN"
"""What ``ASGDStrategy(run=...)`` is if that is not given."""

TRANSPORT_ENV = "LIGHTNING_ASGD_TRANSPORT"
"""What ``transport="auto"`` is then."""


def joined(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parted(place: str) -> tuple[str, int]:
    """Host and port of what :func:`joined` has made. Raises a ``ValueError`` if it is something else."""
    host, colon, port = place.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{place!r} has an IPv6 address without brackets")
    if not (host.split() == [host] and colon and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{place!r} is not a host and a port")
    return host, int(port)


def server_address(server: str, name: str) -> tuple[str, int]:
    """Host and port of ``"host:port"``, with or without a run's name. Raises a ``ConfigurationError``."""
    try:
        host, port = parted(server.partition("/")[0])
    except ValueError:
        port = 0
    if not port:
        raise ConfigurationError(
            f'{name}={server!r}. Expected "host:port" of one host, as `lightning-asgd serve` prints it, or '
            '"[address]:port" for an IPv6 address.'
        )
    return host, port


def run_hosts(run: str, given: str = "run") -> tuple[tuple[tuple[str, int], ...], str]:
    """Addresses and name of ``"10.0.0.1:29400,10.0.0.2:29400/my-model"``; port 0 and a missing name pass."""
    hosts, _, name = run.strip().partition("/") if isinstance(run, str) else ("", "", "")
    try:
        found = tuple(parted(each.strip()) for each in hosts.split(","))
    except ValueError as error:
        raise _no_run(given, run) from error
    if any(not c.isalnum() and c not in "._:@+=/-" for c in name):  # in Python and a shell it stays what it is
        raise _no_run(given, run)
    return found, name


def run_place(run: str, given: str = "run") -> tuple[tuple[tuple[str, int], ...], str]:
    """Addresses and name as :func:`run_hosts` finds them, of a run that serves: it has a name and real ports."""
    hosts, name = run_hosts(run, given)
    if not name or not all(port for _, port in hosts):
        raise _no_run(given, run)
    return hosts, name


def _no_run(given: str, run: str) -> ConfigurationError:
    return ConfigurationError(
        f'{given}={run!r}. Expected "host:port/name", such as "10.0.0.1:29400/my-model" or "[fd00::1]:29400/my-model" '
        '(several hosts: "host1:port,host2:port/name"), with a port up to 65535 and a name of '
        'letters, digits and "._:@+=/-".'
    )
