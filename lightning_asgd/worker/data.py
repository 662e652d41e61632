"""The training data as an exchange sees them."""

from __future__ import annotations

import math

__all__ = ["Data"]


class Data:
    """What an exchange asks and tells of the training data; this one is of a worker whose data nobody shares.

    Attributes:
        batch: samples of one of this worker's batches; 0 if unknown.
    """

    batch: int = 0

    @property
    def trained(self) -> tuple[str, int]:
        """The epoch, and how many of the units granted in it were trained: what a push holds the updates of."""
        return "", 0

    @property
    def left_s(self) -> float:
        """Seconds until this worker will probably push the rest for the next sync point; infinite if unknown."""
        return math.inf

    def ask_ahead(self, seconds: float) -> None:
        """An exchange is about to begin: nothing else gets through to the servers meanwhile, where the network is slow.

        Args:
            seconds: in which it will probably be under way; 0 if that is not known.
        """

    def lose(self) -> None:
        """The others have gone on without this worker and have its batches. Called before it joins again."""
