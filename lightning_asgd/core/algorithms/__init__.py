"""What an algorithm is, the default one, and the settings of an exchange.

An *algorithm* says what workers push (its *payload*), how a shard changes, and what goes back (its *answer*):

*Transforms* run on the server before the algorithm. They weigh, drop or change a push, aggregate several, block
replies, or set the worker's period. The shard calls them in order, chunk by chunk, and keeps their vectors. At a sync
point a worker is *quiescent*: no worker waits for it, and what was aggregated is applied once all are quiescent.
"""
