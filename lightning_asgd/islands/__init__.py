"""Groups of processes that exchange as one worker.

An island is several processes that are one worker to the servers. ``ASGDStrategy(island=...)`` becomes a subclass of
Lightning's own strategy, which trains inside (``islands/strategy.py``). All processes make the same calls in the same
order. The first process has a worker's membership, leases and exchanger, the others objects with the same methods. In a
*shared call* (``IslandGroup.share``) the first process acts, and a broadcast over gloo tells the others the result.
What touches the module's tensors is an *order* within such a call, which every process obeys: pack, send, merge, adopt.
So no process decides by its own clock, and Lightning's loop is the same on all.

In a shared call all processes wait for each other, so most steps do without one. Granted batches are known to all half
a second ahead (``islands/leases.py``), and the first process says after how many steps an exchange is due
(``islands/synchronizer.py``). No grant, revocation, end of a sync interval or change of chief takes effect outside a
shared call.

A process holds a block of every tensor: all under DDP, a shard under FSDP2, a column block under tensor parallelism.
Processes with the same block exchange equal parts of it (``islands/blocks.py``) and copy them to each other. Each has
an ordinary ``Replica`` over its scalars, so every algorithm's replica works. Buffers belong to the first process.

Each process sends its part with the island's worker number (``ExchangePart``), and the first process the ``Exchange``
without an update. The server joins the parts (``islands/server.py``) and then handles the exchange as any other. To
restore a server the first process joins the replacement and orders the others to follow (``Connection.follow``). Each
brings its scalars (``InitPart``) and replays its part. A reply counts once all have their parts of it
(``IslandGroup.agree``).

The main process of a Trainer with several islands starts ``lightning-asgd serve`` for each fit
(``islands/hosted_run.py``), to which the islands attach. ``islands/division.py`` gives each process the devices, the
rank and the process group of its island.
"""
