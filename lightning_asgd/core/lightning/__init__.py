"""ASGDStrategy: what depends on Lightning."""
