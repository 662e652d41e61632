"""Runs whose workers join and leave; serve, status and health.

``lightning-asgd serve`` hosts the rendezvous and servers of one session, named by the run. ``ASGDStrategy(run=...)``
attaches a Trainer to it as one more worker. To Lightning it has one device, and ``global_step`` counts the steps of all
workers.

No operation needs all workers, so none can hold up the others. A sync interval is over when all its units are applied
and their workers know that every server has the updates (``LeaseRequest.applied``). Every worker then takes the
servers' weights and continues by itself.

Of the ranks that torchrun or SLURM set only the local one matters (``core/lightning/worker_place.py``). A worker of
torchrun leaves when its agent is killed, because a new agent would start others on its device (``engines/engine.py``).

*Run metadata* at the coordinator (``protocol.RunMetadata``), which servers do not open, is what workers publish for
workers that join. The bootstrap worker publishes the layout and the tensors that are not exchanged; if it dies the next
worker takes over. After every epoch the chief publishes what a checkpoint would hold of loops, callbacks, schedules and
optimizer settings. A joining worker loads that, takes the servers' weights, opens the present epoch and requests
leases.

A worker's number is used once. The chief is the living worker with the lowest number.

State reports carry the run metadata and the workers that each knows of (``HeartbeatReply.holding``, ``Reply.pushes``),
because a new coordinator cannot know who took part. If several servers are lost, workers report to the first one first,
and the others admit the workers that it admits, so that no push is on one server only.
"""
