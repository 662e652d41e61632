"""Islands: groups of processes that train in lock-step inside and exchange as one worker."""
