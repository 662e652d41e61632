"""A worker in any program: connection, replica, exchanges, sync points.

``core/worker/`` is a worker's part in any program and knows no Lightning. A *shell* is the program around a worker: a
Trainer, Fabric, or a plain loop. A membership (``FixedFleet``, ``ElasticFleet``) asks its shell to log on the chief and
for checkpoint files. ``Participation`` has what every loop needs: set-up, leases, sync points, rejected updates.
``FitSession`` and ``LoopSession`` extend it.

What rounding removes from an update stays in *x* and is part of the next push. At sync points a worker that trains
alone rebases too; several workers adopt the servers' bits.

Sync points. Every worker waits for its exchange, flushes, synchronises with the others, fetches, and synchronises
again. A worker that knows that all data are pushed fetches before it synchronises (``core/worker/sync_point.py``). If
all have then fetched the same versions, they do not synchronise again.

Checkpoints between two sync points. The chief writes them without asking the others. ``Exchanger.catch_up`` takes the
reply in flight, or asks for the servers' weights, and adds the steps since the last push to a copy. It leaves the
module, where a program may have put an average, as it is. The coordinator's reply names the epoch's units that the
weights hold (``Reply.done``). The checkpoint names these and the chief's own, and a resumed run trains the others.
Elastic averaging writes the centre, and ``Hogwild`` a copy of the shared weights.

Memory, beyond what single-device training takes. A worker keeps two vectors as long as its parameters: ``base``, and
the send buffer. A third one is what it fetched last, or by value the reply until it is merged. A server keeps its
shard, a float32 copy of 16-bit parameters, and the updates in flight: on one machine one send buffer, because it maps
only the block of the latest exchange (``SharedBlock.unmap``); by value one buffer per worker that is sending or waits
for a reply.

With ``nsync="auto"`` ``exchange_period.py`` takes medians over a worker's latest nine exchanges: of a step, of an
exchange from send to reply, and of the time that an exchange takes from training. The period is the smallest that hides
the exchange behind the steps and takes less than 2.5 % of the time. Long periods harm most early in training, so a
worker's first 64 steps of a fit may spend a quarter on exchanges, and step n at most 16 / n until 640.

Parameters that change. An exchange reads the tensors that the module has at that moment, so one may be replaced by
another of the same shape. Parameters that become trainable during fit (``BackboneFinetuning``) are noticed at the next
epoch's first batch or sync point. All workers then average them, join a new session and set the shards up with the new
layout. Versions and statistics continue.
"""
