"""How messages are delivered: the interface of a transport, numbered calls, shared memory.

If a connection is cut, it is reopened, and the calls lost with it are repeated (``core/calls/reliable_calls.py``).
Calls are numbered per worker and server, and the server keeps a reply until it is acknowledged. To the layers above
such a call only takes longer. If nothing listens at a server's address, its process has ended and is replaced.
"""
