"""Data that are read shard by shard.

Units are samples, numbered shard by shard (``streams/server.py``); a shard of unknown length gets
2^32 numbers. A worker reports a shard's end before it trains anything granted later (``LeaseRequest.ended``), so that
whatever counts as trained exists. It looks half a step ahead for ends (``streams/stream_reader.py``), so that a rest
too small for a batch is added to a step. Loader processes read shards side by side and make whole steps in turn
(``streams/parallel_reader.py``).

A worker that takes over a shard reads it from the beginning, so all must get the same samples in the same order. They
compare a digest (``DataChoice``); where it differs, each trains what its loader yields.
"""
