"""Servers that are lost: the workers restore their state. Snapshots keep what no worker holds."""
