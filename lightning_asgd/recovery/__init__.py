"""Servers that are lost: the workers restore their state. Snapshots keep what no worker holds.

The main process replaces a server that ends, and writes the replacement's key into the rendezvous
(``core/job/supervisor.py``). It keeps a hot standby, because importing torch takes seconds. The core asks only whether
the state is whole (``Continuity`` in ``core/server/registry.py``). ``recovery/server.py`` takes that object's place on
a server that may have lost any: a replacement, a server of an elastic run, or one that a worker with a state has waited
for. A message of each worker that the server leaves unanswered (``DisconnectWatch``) fails when the server is lost. A
worker trains on until the replacement is there or it needs a reply, and then takes part in the recovery
(``recovery/failover_client.py``, ``recovery/state_recovery.py``):

1. It joins the replacement and sends a *state report*: the weights that it fetched last, their version, and the number
   of every worker's latest push in them (``Reply.pushes``). The coordinator also gets the units that these weights hold
   (``Reply.done``), those that the worker was granted, and the number of its latest collective.
2. When all have reported, the server takes the weights of the highest version. Workers *replay* the pushes that no
   worker has fetched since, at most one each, with their numbers. The server applies them, or answers that its weights
   hold them.
3. A collective of which only some workers have a result is repeated with that result (``Contribution.answer``). At a
   sync point all fetch once more, because a worker could hold weights from before another's replay.

Rules that keep pushes whole:

- If another server than the coordinator is lost, a push goes to the replacement only after the coordinator has answered
  its own part, and a worker asks the coordinator before it continues: the coordinator may have excluded it.
- A worker that was suspected meanwhile first sends the replacement its part of what the coordinator applied.
- The server waits a minute and ``silence_s`` for workers that are not known to be dead or excluded, because a silent
  worker may hold the only copy of an update. A worker that has reported is not suspected meanwhile.
- A worker that the lost coordinator had suspected is recognised by its *incarnation number*, which is part of every
  reply and state report. Its units and pushes are rejected, and it rejoins. Others keep the results that it missed
  (``HeartbeatReply.needed``).

Recovery needs workers that hold a server's weights (``ExchangeConfig.restorable``): algorithms that push differences or
gradients and fetch as often as they push, no aggregating transforms, no compression, and more than one worker.

State that no worker holds (``Algorithm.keeps_state``, such as Adam's moments) is written every ``snapshot_every_s``
(``recovery/snapshot_store.py``) for a replacement. A snapshot is of one version. Its vectors are copied in pieces,
between which messages are handled, and a push first copies the pieces that it changes (``recovery/shard_copy.py``), so
that no message waits for the whole copy.
"""
