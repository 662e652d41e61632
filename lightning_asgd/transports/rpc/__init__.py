"""Messages over torch.distributed.rpc.

``torch.distributed.rpc`` is used with *private groups*: a server's TensorPipe agent knows itself alone, a worker's
knows itself and the servers. So joining involves no other worker. In ``init_rpc``'s dynamic groups one dead name makes
every later join fail. Processes of one machine use sockets (``uv``), because TensorPipe's default transport polls.
Tensors go to another machine through one connection: ``mpt_uv``, with several, loses packets on slow links. Shared
memory is an anonymous file of the worker that the server opens through ``/proc``, so nothing is left behind.

TensorPipe closes its listening socket and never reopens it when a connection ends before it is set up. So a server
checks every two seconds whether it listens (``transports/rpc/tensorpipe.py``). If not, it ends as if killed, unless no
worker holds its state; then it stays for the connected workers. A server waits for its interface, because TensorPipe
would otherwise listen on loopback only; no connection is made without a route, because that would end the process.
"""
