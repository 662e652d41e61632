"""Which process hosts the servers, and servers that one process lends another."""
