"""Messages over ZeroMQ, encrypted.

Security. On one machine everything listens on loopback. TensorPipe unpickles what any process that can connect sends.
``transport="zmq"`` encrypts and authenticates every connection with CURVE, by keys derived from one secret per job, and
decodes nothing before the handshake. Messages are JSON and the bytes of tensors (``core/protocol/codec.py``). Three
exceptions need the secret: a server imports the module of a user's own algorithm, transform or compression; it imports
the ``torch.optim.Optimizer`` that a worker names for ``Downpour``; workers pickle what they broadcast and the metadata
of elastic runs for each other. torch's ``TCPStore`` as rendezvous has no authentication: a foreign process can keep a
job from starting, but cannot send a worker to a server without the secret.
"""
