"""The environment variables that users set, and the address of a run. Imports no torch: a health check is cheap."""

from __future__ import annotations

from lightning_asgd.errors import ConfigurationError

__all__ = ["RUN_ENV", "SECRET_ENV", "SERVER_ENV", "server_address"]

SECRET_ENV = "LIGHTNING_ASGD_SECRET"
"""The secret of ``transport="zmq"``."""

SERVER_ENV, RUN_ENV = "LIGHTNING_ASGD_SERVER", "LIGHTNING_ASGD_RUN_ID"
"""What ``ASGDStrategy(server=..., run_id=...)`` are if neither is given."""


def server_address(server: str) -> tuple[str, int]:
    """Host and port of ``"host:port"``, where an IPv6 address has brackets: ``"[fd00::1]:29400"``.

    Raises:
        ConfigurationError: it is something else.
    """
    host, _, port = server.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    if not (host and port.isdecimal() and 0 < int(port) <= 65535) or (":" in host and not in_brackets):
        raise ConfigurationError(
            f'server={server!r}. Expected "host:port", as `lightning-asgd serve` prints it, or "[address]:port" for an '
            "IPv6 address."
        )
    return host.strip("[]"), int(port)
