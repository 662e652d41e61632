"""What a code for vectors is."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lightning_asgd.validation import Configurable

__all__ = ["Compression"]


class Compression(Configurable):
    """A code for vectors of floats."""

    differences: ClassVar[bool] = True
    """Whether servers send weights as differences."""

    @property
    def factor(self) -> float:
        """Bytes of float32 values divided by those of the code."""
        raise NotImplementedError

    @property
    def decay(self) -> float:
        """The part of what a push has lost that the next one makes up for."""
        return 1.0

    @property
    def downward(self) -> Compression:
        """The code for the servers' weights, of which no later message makes up for what is lost."""
        return self

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Code a vector.

        Args:
            values: shape ``(n,)``, finite; not changed.
        """
        raise NotImplementedError

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """Write what a code stands for.

        Args:
            coded: what :meth:`encode` returned.
            out: shape ``(n,)``.
        """
        raise NotImplementedError
