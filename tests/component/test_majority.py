"""Workers that fall silent at once: where others may go on elsewhere, the few that are left end."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from lightning_asgd.core.protocol import Failure, Heartbeat, Join, Policy
from lightning_asgd.core.server.service import Service

SILENCE_S = 1.0


class Session:
    """A session on its coordinator, whose time is set by hand."""

    def __init__(self, workers: int, policy: Policy) -> None:
        self.now, self.workers = 0.0, workers
        self.service = Service(lambda: self.now)
        for rank in range(workers):
            self.service.handle(Join("j.0.1", rank, workers, policy))

    def passes(self, seconds: float, heard: Collection[int]) -> None:
        for _ in range(int(seconds / 0.1)):
            self.now += 0.1
            for rank in heard:
                self.service.handle(Heartbeat("j.0.1", rank))
            self.service.tick()

    @property
    def ended(self) -> str:
        answer = self.service.handle(Heartbeat("j.0.1", 0))
        return answer.message if isinstance(answer, Failure) else ""


@pytest.mark.parametrize(("left", "ends"), [(1, True), (2, True), (3, False), (4, False)])
def test_fewer_than_half_end(left: int, *, ends: bool) -> None:
    session = Session(6, Policy(SILENCE_S, another_chief=True, elsewhere_s=150.0))
    session.passes(1.0, range(6))
    session.passes(14.0, range(left))
    assert session.ended == "", "they may only have been suspended"
    session.passes(3.0, range(left))
    assert bool(session.ended) is ends
    if ends:
        assert f"are not responding: {left} of 6 are left" in session.ended


def test_without_other_hosts_any_number_continues() -> None:
    session = Session(6, Policy(SILENCE_S))
    session.passes(20.0, [0])
    assert session.ended == ""


def test_those_that_fell_silent_long_ago_do_not_count() -> None:
    session = Session(6, Policy(SILENCE_S, another_chief=True, elsewhere_s=150.0))
    for left in (5, 4, 3, 2, 1):
        session.passes(160.0, range(left))
    assert session.ended == ""
