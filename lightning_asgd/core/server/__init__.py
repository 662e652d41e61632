"""A server: members, collectives, a shard, and the process.

Collectives. Every worker numbers its collectives in a session, and calls with the same number must agree in kind and
name. The workers that have not left complete them. If two disagree, an error names both calls; a worker that does not
arrive is named after ``timeouts.collective_s``.

The coordinator reduces a collective with one result for all (``core/protocol/reductions.py``), so replies do not grow
with the workers. It reduces when the last contribution is there, in the order of ranks: reducing on arrival would
change the bits of sums, and could not take out a worker that leaves.

Workers that are lost. The parent of a worker's process notices its end and tells the servers. A worker that hangs, or
whose parent is elsewhere, is noticed by missing heartbeats: a thread (``core/worker/session_client.py``) sends five
within ``timeouts.silence_s``. A silent worker is *suspected* (``core/server/membership.py``): collectives complete
without it, its leases are granted to others, its pushes are rejected. The others wait at sync points only for the
chief. ``on_worker_failure="abort"``, fewer workers than ``min_workers``, and the end of worker 0's process where that
hosts the servers (``Policy.another_chief``) end the session. Workers under ``Hogwild`` and ``LayerWise`` have no
heartbeat timeout, because what they share cannot be taken back.

A suspended worker learns from the reply to its next push or lease request that it was suspected (``WorkerAwayError``).
It takes the servers' weights, drops what it did not push, and counts work units from 0. The results of collectives that
it missed are kept for it, and no worker waits for it until it has caught up. The other servers use a shorter failure
timeout than server 0. If one rejects a push that server 0 has accepted, the worker sends it its part again and rejoins
all.
"""
