"""How samples of the posterior are fetched."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_asgd.core.protocol.request import Request, publish_path

__all__ = ["Samples"]


@dataclass(frozen=True)
class Samples(Request):
    """Ask for kept copies of the weights: a list of ``(version, tuple of one tensor per group)``, oldest first."""


publish_path(globals())
