"""Which epochs a server knows, and what it takes of one that it does not: what is over is not trained again."""

from __future__ import annotations

import pytest

from lightning_asgd.core.foundation.errors import ProtocolError, WorkerAwayError
from lightning_asgd.core.leases.epoch_history import Epochs
from lightning_asgd.core.protocol import Epoch, LeaseHoldings, LeaseRequest
from lightning_asgd.core.server.membership import Membership

NOBODY = Membership("s", 2)  # who takes part is told by each test


def epoch(key: str, units: int = 4, done: tuple[tuple[int, int], ...] = ()) -> Epoch:
    return Epoch(key, units, (units,), done=done)


def opened(*keys: str) -> Epochs:
    epochs = Epochs(all_train=True)
    for key in keys:
        epochs.open(epoch(key), 0, NOBODY, 0.0)
    return epochs


def train(epochs: Epochs, key: str, units: int, worker: int = 0) -> None:
    leases = epochs.find(key, worker)
    leases.update_members([worker], 0.0)
    for trained in range(units):
        leases.serve(LeaseRequest("s", worker, key, 0, trained, trained, 0.0), 0.0)
    leases.applied(worker, units)


def test_an_epoch_is_opened_once() -> None:
    epochs = Epochs(all_train=True)
    assert list(epochs) == []
    leases = epochs.open(epoch("s/0"), 0, NOBODY, 0.0)
    again = epochs.open(epoch("s/0"), 1, NOBODY, 0.0)
    assert list(epochs) == [leases]
    assert again is leases is epochs.latest


def test_a_worker_with_another_epoch_in_mind_is_told_so() -> None:
    with pytest.raises(ProtocolError, match="5 units"):
        opened("s/0").open(epoch("s/0", units=5), 1, NOBODY, 0.0)


@pytest.mark.parametrize("later", [1, 3, 7], ids=lambda later: f"{later} later")
def test_an_epoch_that_is_not_known_and_older_than_the_latest_is_over(later: int) -> None:
    epochs = opened(*(f"s/{number}" for number in range(1, 1 + later)))
    before = list(epochs)
    leases = epochs.open(epoch("s/0"), 1, NOBODY, 0.0)
    assert leases not in before
    assert leases.finished == ((0, 4),)
    assert epochs.done[0] == f"s/{later}"  # the others go on in theirs


def test_who_is_behind_sees_how_much_was_trained_of_its_epoch() -> None:
    epochs = opened("s/0")
    train(epochs, "s/0", 3)
    epochs.open(epoch("s/1"), 0, NOBODY, 0.0)
    before = list(epochs)
    leases = epochs.open(epoch("s/0"), 1, NOBODY, 0.0)
    assert leases in before
    assert leases.finished == ((0, 3),)


def test_the_latest_few_epochs_are_kept() -> None:
    epochs = opened(*(f"s/{number}" for number in range(20)))
    assert [e.key for e in epochs.progress] == ["s/16", "s/17", "s/18", "s/19"]


def test_an_epoch_that_is_opened_late_drops_none_that_is_newer() -> None:
    """Another worker may be in each of them."""
    epochs = opened("s/5", "s/6", "s/7", "s/8")
    epochs.open(epoch("s/3"), 1, NOBODY, 0.0)
    assert {e.key for e in epochs.progress} == {"s/3", "s/5", "s/6", "s/7", "s/8"}
    epochs.open(epoch("s/9"), 0, NOBODY, 0.0)
    assert {e.key for e in epochs.progress} == {"s/6", "s/7", "s/8", "s/9"}


def test_a_claim_of_an_epoch_that_was_forgotten_and_one_of_none_are_told_apart() -> None:
    epochs = opened(*(f"s/{number}" for number in range(20)))
    with pytest.raises(WorkerAwayError, match="which is over"):
        epochs.find("s/0", 1)
    for key in ("s/20", "other/0", "", "s/", "s/x"):
        with pytest.raises(ProtocolError, match="not opened"):
            epochs.find(key, 1)


def test_another_fit_begins_anew() -> None:
    epochs = opened("s/0", "s/1")
    leases = epochs.open(epoch("s.2/0"), 0, NOBODY, 0.0)
    assert leases.finished == ()
    assert [e.key for e in epochs.progress] == ["s.2/0"]


def test_a_checkpoint_s_units_are_done() -> None:
    leases = Epochs(all_train=True).open(epoch("s/7", done=((0, 2),)), 0, NOBODY, 0.0)
    assert leases.finished == ((0, 2),)


def part(key: str, *granted: tuple[int, int]) -> LeaseHoldings:
    return LeaseHoldings(epoch(key), granted, sum(last - first for first, last in granted), 0)


def test_what_the_restored_weights_hold_is_done_and_the_rest_is_still_its_workers() -> None:
    epochs = Epochs(all_train=True)
    epochs.restore({0: part("s/3", (0, 2)), 1: part("s/3", (2, 3))}, {"s/3": ((0, 1),)})
    leases = epochs.find("s/3", 0)
    assert leases.finished == ((0, 1),)
    epochs.applied("s/3", 0, 2)
    epochs.applied("s/3", 1, 1)
    assert epochs.done == ("s/3", ((0, 3),))


def test_workers_that_report_six_epochs_all_go_on_in_theirs() -> None:
    epochs = Epochs(all_train=True)
    epochs.restore({worker: part(f"s/{worker}", (0, 1)) for worker in range(6)}, {})
    assert [epochs.find(f"s/{worker}", worker).epoch.number for worker in range(6)] == [*range(6)]


@pytest.mark.parametrize("held", [{}, {"s/3": ()}, {"s/4": ((0, 2),)}], ids=["nothing", "its own", "a later one's"])
def test_what_a_worker_that_is_behind_tells_opens_no_epoch_that_is_over(
    held: dict[str, tuple[tuple[int, int], ...]],
) -> None:
    """Weights may be those of the segment's end: what they hold of an epoch that is over is all of it."""
    epochs = Epochs(all_train=True)
    epochs.restore({0: part("s/4"), 1: part("s/2", (0, 1))}, held)
    assert epochs.find("s/2", 1).finished == ((0, 4),)
    assert epochs.done == ("s/4", held.get("s/4", ()))


def test_the_epoch_of_the_weights_counts_although_nobody_is_in_it() -> None:
    """Its workers are gone: one that is behind does not begin its own again."""
    epochs = Epochs(all_train=True)
    epochs.restore({1: part("s/2", (0, 1))}, {"s/3": ((0, 1),)})
    assert epochs.find("s/2", 1).finished == ((0, 4),)
    leases = epochs.open(epoch("s/3"), 1, NOBODY, 0.0)
    assert leases.finished == ((0, 1),)


def test_weights_of_the_fit_before_say_nothing_of_this_one() -> None:
    epochs = Epochs(all_train=True)
    epochs.restore({0: part("s.2/0")}, {"s/9": ((0, 4),)})
    assert epochs.done == ("s.2/0", ())


def test_what_was_written_down_is_gone_on_from() -> None:
    before = opened("s/0", "s/1")
    train(before, "s/1", 2)
    after = Epochs(all_train=False)
    after.remember(before.progress)
    assert after.progress == before.progress
    assert after.done == ("s/1", ((0, 2),))


def test_what_restored_weights_hold_of_an_epoch_is_told_although_nobody_is_in_it() -> None:
    """Else the next server would not know of it."""
    epochs = Epochs(all_train=False)
    epochs.restore({2: part("s/0")}, {"s/1": ((0, 2),)})
    assert epochs.done == ("s/1", ((0, 2),))
    epochs.open(epoch("s/1"), 2, NOBODY, 0.0)
    assert epochs.done == ("s/1", ((0, 2),))
