"""Fewer bytes per exchange: lossy codecs for vectors. The caller keeps what a codec loses (``streams.py``).

A worker on another machine encodes its pushes (``compression/``, ``compression/streams.py``), keeps what the code
loses, and adds it to its next update (error feedback). The server sends weights in 16 bits, or encoded differences from
what it sent this worker before.

At sync points all workers of a job must hold the same bits. So server and workers keep the weights of the last sync
point, named by their digest. The server sends the coded difference since then, and continues from the decoded result
(``streams.SyncPointCodec``), as do workers without compression. A worker that names older weights is sent the new ones
whole. Elastic runs have no common sync points, and send weights whole.

With ``compression="auto"`` each worker measures its link by ``LinkProbe`` messages and times each code
(``link_probe.py``). It takes the code for which latency + values * (seconds of coding + bytes up / speed up + bytes
down / speed down) is least, where a code that loses more has to save a tenth. Whether a lost server can be restored is
decided before the choice, so ``"auto"`` counts as compression there.
"""

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
