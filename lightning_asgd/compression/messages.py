"""How a worker measures its link to a server. Nothing changes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lightning_asgd.core.protocol.request import Request, publish_path

__all__ = ["LinkProbe", "LinkProbed"]


@dataclass(frozen=True)
class LinkProbe(Request):
    """Bytes that are sent to see how long they take."""

    payload: Tensor  # shape `(n,)`, any bytes
    echo: bool = False  # whether the answer has to hold them, too


@dataclass(frozen=True)
class LinkProbed:
    """Answer to :class:`LinkProbe`."""

    has_data: ClassVar[bool] = True

    host: str  # the server's machine: see `shared_memory.host_identity`
    payload: Tensor | None = None  # the same bytes, if they are wanted


publish_path(globals())
