"""Moving messages between workers and servers. Knows nothing of SGD."""
