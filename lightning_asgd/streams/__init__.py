"""Data sets that are read shard by shard: what is common to them, and the libraries that have them."""
