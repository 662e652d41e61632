"""Errors, settings, the layout of tensors on servers, process names, numerics.

Groups. Tensors of the same dtype and role form one flat vector, cut into equal ranges over the servers. Parameters with
``requires_grad=True`` are one role. Tables of embeddings with ``sparse=True`` are the other, *rows*: one group per
dtype and width, cut between rows.

Servers hold nothing else. Frozen parameters and buffers are compared by a hash at the start and sent from worker 0 if
they differ. At sync points all workers take the chief's persistent buffers, and frozen parameters that a program has
changed (``core/worker/untrained_state.py``). Running means and variances are averaged.
"""
