"""Runs whose workers join and leave; serve, status and health."""
