"""A server whose host is elsewhere ends by itself when its lease is over."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from lightning_asgd.core.server import process as server_process


class Exits:
    """Takes the place of a service: what was reported to it."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def report_exit(self, **report: Any) -> None:
        self.reports.append(report)


def test_a_lease_ends_unless_it_is_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(server_process.time, "monotonic", lambda: now)
    lease, service = server_process._Lease(), Exits()
    assert not lease.over
    exited = {"session": "", "worker": 1, "reason": "its process has ended"}
    lines = [{"lease_until": 90.0}, exited, {"lease_until": 102.0}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    server_process._listen(service, lease)  # type: ignore[arg-type]
    assert service.reports == [exited]
    now = 102.0
    assert not lease.over
    now = 102.1
    assert lease.over


def test_lines_that_waited_while_the_server_started_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(server_process.time, "monotonic", lambda: now)
    lease = server_process._Lease()
    lease.extend(50.0)
    assert not lease.over, "the next line may be about to be read"
    now = 100.6
    assert lease.over
