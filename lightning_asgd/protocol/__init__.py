"""What crosses the wire between a worker and a server. Knows nothing of how it travels.

Shapes: a shard holds one flat tensor per group of the layout (see :mod:`lightning_asgd.layout`), so every
``tuple[Tensor, ...]`` below has one entry per group, of shape ``(N_g,)`` with the group's dtype.
"""

from __future__ import annotations

from lightning_asgd.protocol.collective_messages import Contribution, Pickled, Place, SyncReport
from lightning_asgd.protocol.lease_messages import Epoch, LeaseGrant, LeaseHoldings, LeaseRequest, OpenEpoch
from lightning_asgd.protocol.metric_messages import Status, StatusRequest, WorkerMetrics, WorkerStatus
from lightning_asgd.protocol.recovery_messages import ReplayDone, ReplicaState, StateReport
from lightning_asgd.protocol.request import Request
from lightning_asgd.protocol.session_messages import (
    BOOTSTRAPPED,
    PROTOCOL,
    Attach,
    Attached,
    DisconnectWatch,
    Failure,
    Heartbeat,
    HeartbeatReply,
    Join,
    Joined,
    Leave,
    Policy,
    RankHeld,
    RunMetadata,
)
from lightning_asgd.protocol.update_messages import (
    Exchange,
    InitShard,
    LayerGradient,
    Reply,
    Samples,
    ShardState,
    SharedRef,
    nbytes,
)

__all__ = [
    "BOOTSTRAPPED",
    "PROTOCOL",
    "Attach",
    "Attached",
    "Contribution",
    "DisconnectWatch",
    "Epoch",
    "Exchange",
    "Failure",
    "Heartbeat",
    "HeartbeatReply",
    "InitShard",
    "Join",
    "Joined",
    "LayerGradient",
    "LeaseGrant",
    "LeaseHoldings",
    "LeaseRequest",
    "Leave",
    "OpenEpoch",
    "Pickled",
    "Place",
    "Policy",
    "RankHeld",
    "ReplayDone",
    "ReplicaState",
    "Reply",
    "Request",
    "RunMetadata",
    "Samples",
    "ShardState",
    "SharedRef",
    "StateReport",
    "Status",
    "StatusRequest",
    "SyncReport",
    "WorkerMetrics",
    "WorkerStatus",
    "nbytes",
]

for _name in __all__:
    if isinstance(globals()[_name], type):
        # RPC unpickles a message before anybody can compare PROTOCOL. With one path for all, a class that has moved
        # since does not hide the error that names the versions.
        globals()[_name].__module__ = __name__
