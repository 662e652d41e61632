"""Silent workers are found as by a look at each, though most looks are saved."""

from __future__ import annotations

import random

from lightning_asgd.core.server.membership import SilenceDetector

TIMEOUT_S, STEP_S = 3.0, 0.5


def test_silent_workers_are_those_of_a_look_at_each() -> None:
    chance, detector = random.Random(2), SilenceDetector()
    heard: dict[int, float] = {}
    there, now, found = set[int](), 0.0, 0
    for _ in range(4000):
        worker = chance.randrange(12)
        what = chance.choice(["note", "note", "note", "note", "allow", "go", "limit", "return", "look", "look"])
        if what == "note":  # a worker that joins is heard
            there.add(worker)
            heard[worker] = max(now, heard.get(worker, now))
        elif what == "allow":
            there.add(worker)
            heard[worker] = now + chance.choice([0.0, 5.0])
            detector.recheck()
        elif what == "go":
            there.discard(worker)
        elif what == "limit":
            heard = {each: min(when, now) for each, when in heard.items()}
            detector.recheck()
        elif what == "return" and worker in heard:  # it was not heard since
            there.add(worker)
            detector.recheck()
        elif what == "look":
            now += chance.choice([0.1, STEP_S])
            silent = sorted(each for each in there if now - heard[each] > TIMEOUT_S)
            assert detector.silent(heard, there.copy, TIMEOUT_S, now) == silent
            found += len(silent)
            there -= set(silent)
    assert found > 20


def test_no_worker_is_looked_at_while_none_can_be_silent() -> None:
    detector, looks = SilenceDetector(), 0

    def there() -> range:
        nonlocal looks
        looks += 1
        return range(100)

    heard: dict[int, float] = {}
    for tick in range(400):
        now = tick * STEP_S
        if tick % 2 == 0:
            heard = dict.fromkeys(range(100), now)
        assert detector.silent(heard, there, TIMEOUT_S, now) == []
    assert 10 < looks < 100


def test_without_workers_none_is_silent() -> None:
    assert SilenceDetector().silent({}, list, TIMEOUT_S, 10.0) == []


def test_a_suspended_process_makes_no_worker_silent() -> None:
    detector, heard = SilenceDetector(), {0: 0.0}

    def silent(now: float) -> list[int]:
        return detector.silent(heard, lambda: [0], TIMEOUT_S, now)

    assert silent(1.0) == silent(100.0) == []
    assert heard == {0: 99.0}
    assert silent(101.5) == []
    assert silent(102.5) == [0]


def test_a_server_that_looks_late_again_and_again_finds_a_silent_worker() -> None:
    """It is busy, and not suspended: heartbeats are taken between two looks."""
    detector, heard = SilenceDetector(), {0: 0.0, 1: 0.0}
    silent: list[int] = []
    for now in range(3, 40, 3):
        heard[1] = now - 1.0
        silent = detector.silent(heard, lambda: [0, 1], TIMEOUT_S, float(now))
    assert silent == [0]
