"""What happened to workers and servers during a fit: lost, replaced, joined. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lightning_asgd.monitor.metric_log import Fit

KINDS = {
    "lost": "worker lost",
    "replaced": "worker replaced",
    "joined": "worker joined or rejoined",
    "server": "server replaced",
    "other": "other",
}
"""By their names, what they are in words."""

_PATTERNS = {  # the first that is found in a text
    "server": r"^A server was lost|^Server \d+ (continues|had no)",
    "replaced": r"^Process .* replaces ",
    "joined": r"has (re)?joined\.",
    "lost": r"^Worker \d+ (is lost[: ]|is lost \(|has left:|sent no heartbeat)",
}
_PLACE = r"^Worker (\d+) \((.+), process \d+, (.+)\) has joined\."
_REPLACED = r"^Process \d+ on (\S+) replaces .* as worker (\d+) "


@dataclass(frozen=True)
class Fault:
    """Something that happened."""

    at_s: float  # seconds since the fit began
    kind: str  # one of :data:`KINDS`
    worker: int | None  # whose process was lost or joined; None for servers
    text: str  # what the workers' logs said


def faults(fit: Fit) -> list[Fault]:
    """In the order of time."""
    found = []
    for at_s, text in sorted(fit.events):
        kind = next((kind for kind, pattern in _PATTERNS.items() if re.search(pattern, text)), "other")
        worker = re.search(r"as worker (\d+)|^Worker (\d+)", text.partition("\n")[0])
        found.append(Fault(at_s, kind, int(worker[1] or worker[2]) if worker else None, text))
    return found


def places(fit: Fit) -> dict[int, tuple[str, str]]:
    """Machine and device of the workers that are known: as the fit began, and as workers joined later."""
    known = {int(worker): (str(place[0]), str(place[1])) for worker, place in fit.about.get("places", {}).items()}
    for _, text in sorted(fit.events):
        if joined := re.search(_PLACE, text):
            known[int(joined[1])] = joined[2], joined[3]
        elif replaced := re.search(_REPLACED, text):
            worker = int(replaced[2])
            known[worker] = replaced[1], known.get(worker, ("", ""))[1]
    return known
