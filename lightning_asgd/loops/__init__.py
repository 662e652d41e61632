"""Plain training loops and Fabric.

``AsyncSGD`` (``loops/async_sgd.py``) counts steps by hooks of the optimizers. Batches come from a ``LeasedPass``, and
exchanges happen between two batches, so that a push names its units. Signals wait for the end of the batch, but three
seconds at most while servers are lost (``core/job/interruptions.py``). Workers of one run have the same kind of loop
(``Shell.loop``), because progress is counted differently in each.

A plain loop calls backward itself and may clip or accumulate before the step. So with ``LayerWise()`` the means are put
in place at the end of each backward (``layerwise/worker.py``), and clipping and a ``GradScaler`` decide alike on all
workers.

``FabricASGDStrategy`` puts ``AsyncSGD``'s ``LoopControls`` and ``LoopMember`` behind Fabric's hooks, which have class
trees of their own.
"""
