"""Data that are read shard by shard."""
