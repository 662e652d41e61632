from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.pair import ASGD, Pair
from tests.helpers import leaks
from tests.helpers.programs import forking_servers


@pytest.fixture(autouse=True, scope="package")
def _forked_servers() -> Iterator[None]:
    with forking_servers():
        yield


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two ranks that run one case after the other under A-SGD."""
    with leaks.forbidden():
        pair = Pair("pytorch_lightning", ASGD)
        yield pair
        pair.close()
