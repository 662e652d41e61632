"""ASGDStrategy: what depends on Lightning.

``ASGDStrategy`` implements Lightning's hooks, which call four objects. A membership (``FixedFleet``, ``ElasticFleet``)
lives from a session's set-up to its teardown and has the connection, collectives and recovery. ``FitSession`` knows
what happens around a batch and at a sync point. ``LeasedLoop`` or ``FixedSplit`` sets the epochs, batches and steps
that Lightning sees. ``Resumption`` keeps what a checkpoint held until a fit uses it.

``lightning.pytorch`` and ``pytorch_lightning`` are two class trees of the same code, and both may be loaded. This
package's strategy, launchers and callback are classes without a Lightning base (``Extension``), and ``Tree.derive``
adds a tree's class as a base. The ``accelerator`` that a Trainer sets shows the tree. From then on the strategy is a
real ``DDPStrategy`` of that tree, so that Lightning's own checks hold. Until then it is ``Unattached``, a virtual
subclass that is registered when a tree's strategies are imported.

``core/lightning/private_names.py`` lists the undocumented names of Lightning that are used.
``core/lightning/name_check.py`` looks for all of them before anything is started. ``tests/data/lightning_methods.json``
has digests of the methods that this package relies on, because a method can keep its name and do something else.

Joint decisions. Within an epoch workers synchronise before Lightning decides what follows a batch
(``core/lightning/joint_decisions.py``). A worker that would validate, end its epoch or stop reports its counts of steps
and batches (``protocol.Place``). All take the highest counts and decide alike: all stop, validate or end the epoch if
one does. If a worker stops, the coordinator grants nothing more of the epoch (``LeaseRequest.halt``). After hooks that
may set ``trainer.should_stop`` on some workers only, all compare it.

Lightning's counters. ``LeasedBatches`` replaces the training dataloader's batch sampler.
``core/lightning/leased_loop.py`` drives the loop's last batch, validations, ``global_step`` and schedules by the
progress of all workers divided by their number, which DDP would count. Between sync points that is an estimate; at sync
points it is exact. Checkpoints hold DDP's counts and the ranges of units that are done, so a run resumes in mid-epoch
under either strategy.
"""
