"""The rank and world that libraries ask torch.distributed for.

Samplers, data sets, metrics and savers ask ``torch.distributed`` for rank and world, or read ``RANK`` and
``WORLD_SIZE``. ``world/ranks.py`` gives them the true values from before ``setup`` until the process ends, by a default
process group with this package's own backend, ``"asgd"`` (``world/process_group.py``).

The group's collectives go through the coordinator at sync points, before training and after a fit. In the asynchronous
phase workers' calls would not match, so a collective raises ``CollectiveUnavailableError``; the strategy's own barrier
returns at once, and its reductions are local. After a fit a worker stays a member of its session until the next one
(``core/worker/fleet.py``).

If there is a process group, Lightning broadcasts a SIGTERM flag before every batch. That would synchronise all workers,
so the broadcast is removed while a Trainer runs with this strategy (``joint_decisions.Sigterm``).

``new_group`` creates torch's own group with ``"rpc"``. With ``"zmq"`` this package's backend serves
``new_group(backend="gloo")`` at sync points, because torch's group encrypts nothing.
"""
