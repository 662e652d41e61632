r"""SparseLoCo: long local runs, of which only the largest changes are sent, in two bits each.

With the *pseudo-gradient* :math:`D = w_i - x_i` of a worker, its residual *e*, a code *Q* of the *k* largest values of
every tile, and *N* live workers:

.. math::

    e \leftarrow \beta e + D, \qquad q = Q(\mathrm{TopK}(e)), \qquad e \leftarrow e - q, \qquad
    w \leftarrow w - \frac{\alpha}{N} q, \qquad \alpha = \sqrt N

References:
    A. Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706, algorithm 1.

Departures:
    The paper's workers wait for each other, and the mean of their codes is applied as one update. Here each push is
    applied when it arrives. The paper's programs average every value over the workers that have sent it, which are
    fewer than *N*; a server that applies one push at a time does not know them. :math:`\alpha = \sqrt N` stands for
    that, and is ours: with :math:`\alpha = 1` a value that one worker has sent would move by 1 / N of it.
    Workers push codes to servers, and fetch weights in bfloat16; the paper's workers exchange the codes themselves.
    What a tile is, and the code of two bits, are those of :class:`~lightning_asgd.compression.TopTiles`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_asgd.compression.tiles import TopTiles
from lightning_asgd.core.algorithms.asgd import factor
from lightning_asgd.core.algorithms.base import Algorithm, Push
from lightning_asgd.core.foundation.validation import at_least


@dataclass(frozen=True)
class SparseLoCo(Algorithm):
    r"""Workers push the largest changes of every 4,096 parameters, 14 bits each; there is no outer momentum.

    Use it with long periods, such as ``nsync=15`` to 50, and with an adaptive optimizer, as the paper does.

    Args:
        lr: the outer learning rate :math:`\alpha`; None for the square root of the number of workers, tried with up to
            16 and AdamW. After SGD with momentum, whose pushes agree, it is too large: use 1.
        largest: values that are sent of every 4,096, even: 128 are 3.1 %, 0.44 bits per parameter.
        residual_decay: the fraction of a push's residual, of what was not sent, that is added to the next push.

    State:
        none beside the weights, but a lost server cannot be restored from the workers' copies. Workers keep two
        vectors: the residual, and a copy from before the latest push in case that is refused. A checkpoint holds no
        residual, and a worker that leaves takes its own with it.

    Staleness:
        ignored, as by :class:`ASGD`.
    """

    lr: float | None = None
    largest: int = 128
    residual_decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr is not None:
            at_least("SparseLoCo(lr)", self.lr, 0, above=True)
        self.code  # noqa: B018  checks the others

    @property
    def code(self) -> TopTiles:
        """See :class:`Algorithm`."""
        return TopTiles(self.largest, self.residual_decay)

    def apply(self, weights: Tensor, update: Tensor, slots: dict[str, Any], push: Push) -> None:
        """See :class:`Algorithm`; ``update`` is -q."""
        lr = math.sqrt(max(push.live, 1)) if self.lr is None else self.lr
        weights.add_(update, alpha=lr * factor("mean", push))
