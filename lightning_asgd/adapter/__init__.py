"""Everything that knows Lightning: the strategy, its loops, callbacks and launchers."""
