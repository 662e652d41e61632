from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.helpers import leaks

TESTS = Path(__file__).resolve().parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for a background job and all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # nothing of what the tests import is garbage
torch.set_num_threads(1)  # before anything starts torch's thread pool, which a forked child would lack

# Every run tries the same examples, so that a failure comes from the change under test and from nothing else.
# For a search with other examples: pytest --hypothesis-profile=search
hypothesis.settings.register_profile("steady", derandomize=True, database=None, deadline=None, max_examples=40)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("steady")


def pytest_collection_finish() -> None:
    gc.freeze()  # forked processes would copy every page that the collector looks at
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # triton's bindings complain of what is left at the interpreter's end


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    # A Trainer keeps its servers, its connection and its variables for the next call: see tests/lightning/conftest.py.
    # The fork server of the examples' tests stays.
    # The battery looks by itself, after its last case.
    if request.node.path.relative_to(TESTS).parts[0] in ("lightning", "conformance", "examples"):
        yield
    else:
        with leaks.forbidden():
            yield
