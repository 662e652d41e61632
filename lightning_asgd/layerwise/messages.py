"""The message of layer-wise gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_asgd.core.protocol.request import Request, publish_path

__all__ = ["LayerGradient"]


@dataclass(frozen=True)
class LayerGradient(Request):
    """A piece of the gradient of some layers, to be answered with the mean of all workers'."""

    phase: int  # number of sync points that the worker has passed
    step: int  # number of the step since the last one
    layer: int  # number of the piece
    gradient: Tensor | None  # shape `(n,)`, the layers' parameters one after the other; None: the worker ends the phase


publish_path(globals())
