"""What programs do beside plain training: units, weights they set, callbacks with modules, log lines.

The fixed split serves streams without shards or among several loaders, loaders without a distributed sampler,
validations by the clock, and algorithms whose workers wait for each other. In an elastic run these algorithms lease
data too, and a shard applies aggregated pushes early when a worker joins or an interval ends (``Shard.exchange``).
"""
