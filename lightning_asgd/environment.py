"""The environment variables that users set, and the address of a run. Imports no torch: a health check is cheap."""

from __future__ import annotations

from lightning_asgd.errors import ConfigurationError

__all__ = [
    "RUN_ENV",
    "SECRET_ENV",
    "SERVER_ENV",
    "TRANSPORT_ENV",
    "joined",
    "parted",
    "server_address",
    "server_addresses",
]

SECRET_ENV = "LIGHTNING_ASGD_SECRET"
"""The secret of ``transport="zmq"``."""

SERVER_ENV, RUN_ENV = "LIGHTNING_ASGD_SERVER", "LIGHTNING_ASGD_RUN_ID"
"""What ``ASGDStrategy(server=..., run_id=...)`` are if neither is given."""

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
    if not (host and colon and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{place!r} is not a host and a port")
    return host, int(port)


def server_address(server: str, name: str = "server") -> tuple[str, int]:
    """Host and port of ``"host:port"`` or ``"[fd00::1]:29400"``. Raises a ``ConfigurationError`` that has ``name``."""
    try:
        host, port = parted(server)
    except ValueError:
        port = 0
    if not port:
        raise ConfigurationError(
            f'{name}={server!r}. Expected "host:port", as `lightning-asgd serve` prints it, or "[address]:port" for an '
            "IPv6 address."
        )
    return host, port


def server_addresses(servers: str, name: str = "server") -> tuple[tuple[str, int], ...]:
    """The same of several, with commas between them: ``"10.0.0.1:29400,10.0.0.2:29400"``."""
    return tuple(server_address(each.strip(), name) for each in servers.split(","))
