"""Combined batches are those of Lightning's ``CombinedLoader``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytorch_lightning.utilities import CombinedLoader

from lightning_asgd.combined.combined_data import combined_batches


class Part(list[int]):
    """A loader: a list would be several."""


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@given(lengths=st.lists(st.integers(1, 7), min_size=2, max_size=4))
def test_batches_are_combined_as_by_lightning(mode: str, lengths: list[int]) -> None:
    parts = [Part(range(10 * place, 10 * place + length)) for place, length in enumerate(lengths)]
    assert [(batch, number, 0) for number, batch in combined_batches(mode, parts)] == list(CombinedLoader(parts, mode))
