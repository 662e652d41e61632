"""Fewer bytes per exchange: lossy codecs for vectors. The caller keeps what a codec loses (``streams.py``)."""

from __future__ import annotations

from typing import Any

from lightning_asgd.compression.codes import Auto, Cast, Int8, TopK
from lightning_asgd.compression.low_bits import Float4, Int2, Sign
from lightning_asgd.compression.tiles import TopTiles
from lightning_asgd.core.algorithms.compression import Compression
from lightning_asgd.core.foundation.validation import by_name

__all__ = ["Cast", "Compression", "Float4", "Int2", "Int8", "Sign", "TopK", "TopTiles", "find_compression"]

_NAMED: dict[str, Compression] = {
    "bf16": Cast("bfloat16"),
    "fp16": Cast("float16"),
    "int8": Int8(),
    "4bit": Float4(),
    "2bit": Int2(),
    "1bit": Sign(),
    "topk": TopK(),
    "auto": Auto(),
}


def find_compression(compression: Any) -> Compression | None:
    """The compression that a user means.

    Args:
        compression: an object, the name of one, or None.

    Raises:
        ConfigurationError: there is no such compression.
    """
    if compression is None:
        return None
    found: Compression = by_name("compression", compression, _NAMED, Compression, "TopK(0.01)")
    return found
