"""How a worker shares its gradients layer by layer."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from lightning_asgd.algorithms.layerwise import LayerWise
from lightning_asgd.core.calls.shared_memory import host_identity
from lightning_asgd.core.worker.collectives import Collectives
from lightning_asgd.core.worker.module_state import average, make_identical
from lightning_asgd.core.worker.setup import Entry, trainable_parameters
from lightning_asgd.layerwise.layer_gradients import LayerGradients
from lightning_asgd.layerwise.program_gradients import ProgramGradients


def connect(entry: Entry) -> LayerGradients:
    """The gradients of a worker's layers; in a plain loop the program calls backward itself."""
    module, collectives = entry.module, entry.collectives
    training = entry.training
    make_identical(collectives, module, trainable_parameters(module))
    kind = LayerGradients if training.closures else ProgramGradients
    tied = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.named_parameters()))
    return kind(
        entry.connection,
        entry.layout,
        module,
        cast(LayerWise, entry.algorithm),
        replace(training, late_steps=False) if tied else training,
        lambda: average(collectives, trainable_parameters(module)),
        one_machine=_on_one_machine(collectives),
    )


def _on_one_machine(collectives: Collectives) -> bool:
    host = host_identity()
    return bool(collectives.reduced("all_reduce", "the workers' machines", host, "same").value) and host != ""
