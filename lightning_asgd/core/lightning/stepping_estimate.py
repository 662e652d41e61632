"""``Trainer.estimated_stepping_batches`` within an epoch.

Lightning computes it from the batches that a worker expects to train. That number follows from its speed, and changes
with every batch. A program that divides ``global_step`` by the estimate, as for a momentum that rises to 1, needs the
same on all workers.
"""

from __future__ import annotations

from typing import Any

from lightning_asgd.core.lightning.class_trees import Tree
from lightning_asgd.core.lightning.private_names import expected_batches


def keep_estimate(tree: Tree) -> None:
    """Make it the same during an epoch as before it, on all Trainers of a tree."""
    estimate = tree.Trainer.estimated_stepping_batches

    def nominal(trainer: Any) -> Any:
        session = getattr(trainer.strategy, "fit_session", None)
        batches = getattr(getattr(session, "data", None), "nominal", None)  # None where Lightning knows them itself
        if batches is None:
            return estimate.fget(trainer)
        present = expected_batches(trainer)
        expected_batches.set(trainer, batches)
        try:
            return estimate.fget(trainer)
        finally:
            expected_batches.set(trainer, present)

    tree.Trainer.estimated_stepping_batches = property(nominal, doc=estimate.__doc__)
