"""What a codec for vectors is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.layout import Layout, Role
from lightning_asgd.core.foundation.validation import Configurable


class Compression(Configurable):
    """A codec for vectors of floats."""

    differences: ClassVar[bool] = True
    """Whether servers send weights as differences."""

    @property
    def factor(self) -> float:
        """Bytes of float32 values divided by those of the codec."""
        raise NotImplementedError

    @property
    def decay(self) -> float:
        """The fraction of a push's residual that is added to the next push."""
        return 1.0

    @property
    def downward(self) -> Compression:
        """The codec for weights that servers send. These have no error feedback, so it must be more accurate."""
        return self

    def chosen(self, connection: object, layout: Layout) -> Compression | None:
        """The codec for exchanges of this layout by a worker with this connection, where it depends on that."""
        return self

    def holds(self, values: Tensor) -> bool:
        """Whether values of this size can be coded without being clamped."""
        return True

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """Code a vector: ``values``, shape ``(n,)``, are finite, and are not changed."""
        raise NotImplementedError

    def decode(self, coded: tuple[Tensor, ...], out: Tensor) -> None:
        """Write what a code stands for: ``coded`` is what :meth:`encode` returned; ``out`` has the shape ``(n,)``."""
        raise NotImplementedError


def is_coded(role: Role, dtype: str) -> bool:
    """Whether a group is compressed: a residual of 16 bits would lose small updates."""
    return role is Role.PARAMETER and dtype in ("float32", "float64")


def check_lengths(code: Compression, coded: Sequence[Tensor], expected: Sequence[int]) -> None:
    """Raise a :class:`ProtocolError` unless the vectors that a code was received as have these lengths."""
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else None for part in coded]
    if shapes != [(length,) for length in expected]:
        raise ProtocolError(f"{code} was received as vectors of shapes {shapes}. Expected lengths {list(expected)}.")
