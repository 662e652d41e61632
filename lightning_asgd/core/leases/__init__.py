"""Which worker trains which units of an epoch, on the server and on the workers.

An epoch is a sequence of *work units*, its samples, in an order that every worker computes from the same seed and
compares by a digest. If digests differ, all share the chief's order (``core/leases/common_order.py``). A worker with
less than half of its samples in common with the chief trains its own share: its sampler has divided the data. *Sync
intervals* end where all workers meet: at validations, the end of the epoch, ``max_steps``.

How much. A worker requests leases of optimizer steps from the coordinator (``core/leases/self_scheduling.py``). It gets
half of its expected share of the rest of the interval, at most 0.5 s of work, single steps near the end, and nothing if
the others finish sooner without it. So all workers finish within about one step of the fastest. Every worker gets at
least one unit of an interval, because Lightning would otherwise not notice its end.

With many workers no request looks at all of them. Sums are kept as they change (``core/leases/totals.py``); beyond 16
other workers they say when the rest is trained (``core/leases/crowd.py``). Only the latest pushes and the units done,
which each reply names for recovery, grow with the workers.

When. A worker requests more while it has work for one and a half times its last request's duration. Lease requests have
a connection of their own (``LeaseRequest.urgent``), because they would wait behind an exchange; before an exchange a
worker requests what it needs until that is over.

Given back. Units that a worker held and did not train are granted to others.

Batches. A worker divides a lease into as few steps as possible, and these into nearly equal batches (``Plan.batches``).
A sampler that composes its own batches is not divided: there a unit is a batch. Pushes carry the batch size, by which
the mean is weighted (``Push.weight``), or with ``Advanced(units=...)`` the samples or tokens of the steps
(``programs/batch_units.py``).
"""
