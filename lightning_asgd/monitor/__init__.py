"""Metrics of the workers."""
