"""Random numbers from the global generators of torch, Python and NumPy that begin at a seed, apart from all others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RandomNumbers:
    """A sequence of random numbers that begins at a seed. What is drawn outside of :meth:`use` does not change it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._states: tuple[Any, ...] | None = None
        self._first: tuple[Any, ...] | None = None

    @property
    def drawn(self) -> bool:
        """Whether any was drawn."""
        if self._states is None or self._first is None:
            return False
        return self._states[:2] != self._first[:2] or not torch.equal(self._states[2], self._first[2])

    @contextmanager
    def use(self) -> Iterator[None]:
        """Have the global generators continue this sequence; their own states are afterwards as before."""
        import numpy

        kept = _states()
        try:
            if self._states is None:
                torch.default_generator.manual_seed(self._seed)  # torch.manual_seed would seed devices too
                random.seed(self._seed)
                numpy.random.seed(self._seed % 2**32)
                self._first = _states()
            else:
                _restore(self._states)
            yield
        finally:
            self._states = _states()
            _restore(kept)


@contextmanager
def same_random_numbers(seed: int) -> Iterator[None]:
    """Have random numbers begin at a seed; the states of the global generators are afterwards as before."""
    with RandomNumbers(seed).use():
        yield


def _states() -> tuple[Any, ...]:
    import numpy

    state: Any = numpy.random.get_state()
    kind, keys, place, *rest = state
    return random.getstate(), (kind, keys.tobytes(), place, *rest), torch.get_rng_state()


def _restore(states: tuple[Any, ...]) -> None:
    import numpy

    python, (kind, keys, *rest), torchs = states
    random.setstate(python)
    numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))
    torch.set_rng_state(torchs)
