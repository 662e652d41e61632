"""The transport over ZeroMQ: every connection is encrypted and authenticated with CURVE, and nothing is unpickled.

Only this package imports ``zmq`` (``pip install lightning-asgd[zmq]``). All processes of a job share a secret, from
which the key pairs of its servers and of its workers follow. So a server answers nobody, not even with an error, who
does not know the secret, and a worker sends nothing to who does not know it: the handshake fails before a message is
read or memory is taken for one. Messages are those of :mod:`lightning_asgd.transport.wire`, cut in frames of a few
megabytes, so that no peer can have more than a frame allocated before its handshake is through.

A connection that breaks is made again by ZeroMQ; calls that were not answered are sent again there, and answered once
(see :mod:`lightning_asgd.transport.once`). Where nobody listens at a server's address any more its process has ended,
and calls fail.
"""
