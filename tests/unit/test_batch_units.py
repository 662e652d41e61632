"""What batches count, and what of them is in a worker's steps."""

from __future__ import annotations

import json
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.programs.batch_units import TrainedUnits, counter_of, samples_in, tokens_in


@dataclass
class Rows:
    x: torch.Tensor


MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
IDS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, 4),
        (UserDict({"input_ids": IDS, "attention_mask": MASK}), 4),  # as a tokenizer's encoding
        ({"input_ids": IDS, "labels": torch.tensor([[-100, 1, 2], [-100, -100, 3]])}, 3),
        ({"attention_mask": MASK, "labels": torch.tensor([[-100, 1, 2], [-100, -100, 3]])}, 3),  # masked prompts
        ({"attention_mask": MASK, "labels": torch.tensor([1, 0])}, 4),  # classes
        ({"a": {"attention_mask": MASK}, "b": {"attention_mask": MASK}}, 8),  # two loaders
        ([UserDict({"attention_mask": MASK}), torch.tensor([1, 0])], 4),
        ({"input_ids": IDS, "attention_mask": None}, 6),
        ((torch.rand(2, 3), IDS), 6),
        (torch.arange(5), 5),
        (torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged), 5),
    ],
)
def test_tokens_are_found(batch: Any, tokens: int) -> None:
    assert int(tokens_in(batch)) == tokens


def test_a_batch_without_tokens_is_named() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^Advanced.units=.*of type list has no attention_mask.*=lambda batch"
    ):
        tokens_in([torch.rand(3), torch.tensor(1)])


def test_samples_are_rows_of_the_first_tensor() -> None:
    assert samples_in({"x": IDS}) == samples_in(UserDict({"x": IDS})) == samples_in(("name", IDS)) == 2
    assert samples_in(Rows(IDS)) == samples_in([UserDict({"x": IDS})]) == 2
    assert samples_in("text") == samples_in(torch.tensor(1.0)) == 1


def test_what_is_in_steps_counts_and_what_is_discarded_does_not() -> None:
    units = TrainedUnits("tokens", len)
    for batch in ("abc", "de"):  # accumulated
        units.begin(batch)
        assert units.total == 0
    units.step()
    assert units.total == 5
    units.begin("f")
    units.step()
    units.discard()
    units.begin("gh")
    assert units.total == 5
    units.step()
    assert units.total == 7
    units.step()  # of another optimizer
    units.begin("kl")
    units.step()
    units.step()
    units.discard()
    assert units.total == 7
    units.begin("i")  # one of several batches of a step, which others have trained
    units.discard()
    assert units.total == 7


def test_a_count_may_be_a_tensor_that_is_read_when_it_is_needed() -> None:
    units = counter_of("tokens")
    for _ in range(3):
        units.begin({"attention_mask": MASK})
        units.step()
    assert units.total == 12.0


def test_wrong_units_are_named() -> None:
    assert counter_of(None).name == ""
    assert ASGDStrategy(advanced=Advanced(units=len)).settings["units"] == "len"
    assert json.dumps(ASGDStrategy(advanced=Advanced(units=partial(len))).settings)
    with pytest.raises(ConfigurationError, match=r"Advanced.units='words'. Expected 'samples', 'tokens', a function"):
        ASGDStrategy(advanced=Advanced(units="words"))
