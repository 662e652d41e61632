"""A few workers are granted what they were when every request looked at all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lightning_asgd.core.leases.table import Leases
from lightning_asgd.core.protocol import LeaseGrant
from tests.component import test_leases
from tests.component.test_leases import (  # noqa: F401  # they are run again, with both
    test_a_worker_asks_no_more_when_there_is_nothing_to_expect,
    test_a_worker_that_hangs_is_waited_for_only_with_what_it_holds,
    test_every_unit_is_applied_once_whoever_comes_stops_and_dies,
    test_every_unit_is_trained_once_in_its_segment,
    test_what_a_dead_worker_had_not_pushed_is_trained_by_others,
    test_what_a_worker_leaves_is_trained_by_others,
    test_who_is_far_from_the_servers_trains_less_so_that_all_have_pushed_at_once,
)
from tests.helpers.linear_leases import LinearLeases

CHANGES = ("serve", "retry", "update_members", "forget", "applied", "stop_waiting_for")


class Both:
    """Leases of both kinds, which must answer alike."""

    def __init__(self, epoch: Any, *, before: Both | None = None, **about: Any) -> None:
        olds = (None, None) if before is None else (before.new, before.old)
        self.new = Leases(epoch, before=olds[0], **about)
        self.old = LinearLeases(epoch, before=olds[1], **about)

    def __getattr__(self, name: str) -> Any:
        if name not in CHANGES:
            return getattr(self.new, name)

        def change(*args: Any) -> Any:
            new, old = getattr(self.new, name)(*args), getattr(self.old, name)(*args)
            assert self.new.finished == self.old.finished
            if new is not None:
                assert sorted(map(plain, new)) == sorted(map(plain, old))
                for one, other in zip(sorted(new, key=whose), sorted(old, key=whose), strict=True):
                    if isinstance(one.reply, LeaseGrant):
                        assert one.reply.progress == pytest.approx(other.reply.progress, abs=1e-6)
                        assert one.reply.ratio == pytest.approx(other.reply.ratio)
            return new

        return change


def whose(answer: Any) -> tuple[int, str]:
    return answer.request.worker, plain(answer)


def plain(answer: Any) -> str:
    reply = answer.reply
    return f"{answer.request} {replace(reply, progress=0.0, ratio=0.0) if isinstance(reply, LeaseGrant) else reply}"


@pytest.fixture(autouse=True, scope="module")
def both() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_leases, "Leases", Both)
        yield
