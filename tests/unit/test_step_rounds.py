"""Which step closes a round: whatever the order of the list, and however many steps are skipped."""

from __future__ import annotations

import doctest

import pytest

from lightning_asgd.loops import session
from lightning_asgd.loops.session import Rounds


def closing(steps: str, number: int = 2) -> str:
    """The same steps, those that close a round in lower case."""
    rounds = Rounds(number)
    return "".join(each.lower() if rounds.ends(each) else each for each in steps)


def test_example_in_the_docstring_runs() -> None:
    assert doctest.testmod(session) == (0, 2)  # failed, attempted


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("DGDGDG", "DgDgDg"),
        ("GDGDGD", "GdGdGd"),
        ("DDDDDGDDDDDG", "DDDDDgDDDDDg"),  # five steps of a critic for one of the generator
        ("DGDDGDG", "DgDDgDg"),  # a step of G was skipped
        ("DGGDGDG", "DggDgDg"),  # one of D was: the round is over with G all the same
        ("DGGGGDG", "DggggDg"),
    ],
)
def test_the_last_optimizer_of_the_longest_round_closes_it(steps: str, expected: str) -> None:
    assert closing(steps) == expected


@pytest.mark.parametrize("steps", ["AAAA", "A" * 40])
def test_every_step_of_one_optimizer_closes_a_round(steps: str) -> None:
    assert closing(steps, 1) == steps.lower()


def test_a_phase_of_one_optimizer_alone_closes_rounds_after_sixteen() -> None:
    assert closing("A" * 20) == "A" * 16 + "aaaa"
    assert closing("DG" + "D" * 20) == "Dg" + "D" * 16 + "dddd"
    assert closing("DG" + "G" * 20) == "Dg" + "g" * 20


def test_the_order_is_known_again_as_soon_as_the_phase_is_over() -> None:
    steps = closing("DG" + "D" * 30 + "DGDGDG")
    assert steps.endswith("dgDgDg")


def test_a_listed_optimizer_that_never_steps_holds_nothing_up_for_long() -> None:
    assert closing("AB" * 20, 3) == "AB" * 16 + "Ab" * 4
    assert closing("AB" * 18 + "ABC" * 3, 3).endswith("Abc" + "ABc" * 2)


def test_a_critic_with_more_steps_than_that_is_followed_at_once_by_the_usual_round() -> None:
    steps = "D" * 25 + "G"
    assert closing(steps * 2) == ("D" * 16 + "d" * 9 + "g") * 2
