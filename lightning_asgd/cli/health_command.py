"""``lightning-asgd health``: whether the servers of an elastic run answer, for probes."""

from __future__ import annotations

import sys

__all__ = ["health"]


def health(run: str, *, timeout_s: float = 3.0) -> int:
    """Check that the servers of an elastic run answer.

    Prints one line. The exit code is 0 if all servers have answered `serve` just now, else 1. For readiness and
    liveness probes: it takes a fraction of a second.

    Args:
        run: "host:port" or "host:port/name", as `lightning-asgd serve` prints it.
        timeout_s: seconds to wait for a reply.
    """
    from lightning_asgd.environment import server_address
    from lightning_asgd.transports.health import ask_health
    from lightning_asgd.validation import at_least

    at_least("timeout_s", timeout_s, 0, above=True, finite=True)
    good, text = ask_health(*server_address(run, "run"), timeout_s)
    (sys.stdout if good else sys.stderr).write(f"{text}\n")
    return 0 if good else 1
