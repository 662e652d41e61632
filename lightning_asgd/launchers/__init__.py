"""Workers that are forked or spawned."""
