"""Server side: the shard, the coordinator, and the process they live in. Never imports Lightning."""
