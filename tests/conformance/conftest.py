from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.pair import ASGD, Pair
from tests.helpers import leaks


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two ranks that run one case after the other under A-SGD."""
    with leaks.forbidden():
        pair = Pair("pytorch_lightning", ASGD)
        yield pair
        pair.close()
