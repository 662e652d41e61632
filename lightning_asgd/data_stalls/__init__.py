"""How long training waits for data."""
