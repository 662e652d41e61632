"""Groups of processes that exchange as one worker."""
