"""``lightning-asgd health``: whether the servers of an elastic run answer, for probes."""

from __future__ import annotations

import sys


def health(run: str, *, timeout_s: float = 3.0) -> int:
    """Check that the servers of an elastic run answer.

    Prints one line within a fraction of a second, for probes. The exit code is 0 if all servers answer, else 1.

    Args:
        run: "host:port" or "host:port/name" of one host, as `lightning-asgd serve` prints it.
        timeout_s: seconds to wait for a reply.
    """
    from lightning_asgd.core.foundation.environment import server_address
    from lightning_asgd.core.foundation.validation import at_least
    from lightning_asgd.elastic.health import ask_health

    at_least("timeout_s", timeout_s, 0, above=True, finite=True)
    good, text = ask_health(*server_address(run, "run"), timeout_s)
    if good and (name := run.partition("/")[2]) and not text.startswith(f"Run {name!r} at "):
        good, text = False, f"{text} Expected run {name!r}, as given."
    (sys.stdout if good else sys.stderr).write(f"{text}\n")
    return 0 if good else 1
