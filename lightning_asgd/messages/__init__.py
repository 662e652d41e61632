"""What crosses the wire between a worker and a server. Knows nothing of how it travels.

Shapes: a shard holds one flat tensor per group of the layout (see :mod:`lightning_asgd.layout`), so every
``tuple[Tensor, ...]`` below has one entry per group, of shape ``(N_g,)`` with the group's dtype.
"""

from __future__ import annotations

from lightning_asgd.messages.collectives import Contribution, Meeting, Pickled, Place
from lightning_asgd.messages.epochs import Claim, Epoch, Grant, OpenEpoch, Part
from lightning_asgd.messages.figures import Figures, Look, View, WorkerView
from lightning_asgd.messages.restoration import Held, Offer, Settled
from lightning_asgd.messages.session import (
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
from lightning_asgd.messages.weights import (
    Exchange,
    Groups,
    Initialise,
    LayerGradient,
    Reply,
    Role,
    Samples,
    ShardState,
    SharedRef,
    Verdict,
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
    "Groups",
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
    "Role",
    "Samples",
    "Settled",
    "ShardState",
    "SharedRef",
    "Verdict",
    "View",
    "Watch",
    "WorkerView",
    "nbytes",
]
