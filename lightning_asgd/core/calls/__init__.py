"""How messages are delivered: the interface of a transport, numbered calls, shared memory."""
