"""A server: members, collectives, a shard, and the process."""
