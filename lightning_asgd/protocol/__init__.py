"""What crosses the wire between a worker and a server. Knows nothing of how it travels.

Shapes: a shard holds one flat tensor per group of the layout (see :mod:`lightning_asgd.layout`), so every
``tuple[Tensor, ...]`` below has one entry per group, of shape ``(N_g,)`` with the group's dtype.
"""

from __future__ import annotations

from lightning_asgd.protocol.collective_messages import Contribution, Meeting, Pickled, Place
from lightning_asgd.protocol.lease_messages import Claim, Epoch, Grant, OpenEpoch, Part
from lightning_asgd.protocol.metric_messages import Figures, Look, View, WorkerView
from lightning_asgd.protocol.recovery_messages import Held, Offer, Settled
from lightning_asgd.protocol.session_messages import (
    FOUNDED,
    PROTOCOL,
    Attach,
    Attached,
    Beat,
    Beaten,
    Failure,
    Join,
    Joined,
    Leave,
    Note,
    Policy,
    Watch,
)
from lightning_asgd.protocol.update_messages import (
    Exchange,
    Initialise,
    LayerGradient,
    Reply,
    Samples,
    ShardState,
    SharedRef,
    nbytes,
)

__all__ = [
    "FOUNDED",
    "PROTOCOL",
    "Attach",
    "Attached",
    "Beat",
    "Beaten",
    "Claim",
    "Contribution",
    "Epoch",
    "Exchange",
    "Failure",
    "Figures",
    "Grant",
    "Held",
    "Initialise",
    "Join",
    "Joined",
    "LayerGradient",
    "Leave",
    "Look",
    "Meeting",
    "Note",
    "Offer",
    "OpenEpoch",
    "Part",
    "Pickled",
    "Place",
    "Policy",
    "Reply",
    "Samples",
    "Settled",
    "ShardState",
    "SharedRef",
    "View",
    "Watch",
    "WorkerView",
    "nbytes",
]
