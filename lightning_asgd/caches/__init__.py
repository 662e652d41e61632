"""Samples in memory, for any training loop."""
