"""Samples in memory, for any training loop.

Processes of one user find memory by its name (``caches/named_memory.py``). It is an anonymous file, which a process
finds by looking through ``/proc`` for a process that has it open. So no process serves it, and nothing is left when the
last one ends. A process opens each memory once, because a lock of ``fcntl`` ends when its process closes any
descriptor.

``CachedDataset`` keeps samples there. Machines ask each other (``caches/peer_caches.py``) over ZeroMQ with the job's
secret, because samples are unpickled. ``SharedLoader`` keeps only numbers there: which program makes which batch
(``caches/batch_board.py``).
"""
