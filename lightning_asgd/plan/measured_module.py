"""A LightningModule that `lightning-asgd plan` measures: seconds of a step, memory, which layers are recomputed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_asgd.cli.console_tables import in_bytes, table
from lightning_asgd.cli.user_code import module_and_loader
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.plan import sizing
from lightning_asgd.plan.mini_batch import RECOMPUTED, Choice, check_solver, choose_ways

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class MeasuredModule:
    """What was measured of a module."""

    parameter_bytes: int
    step_s: dict[int, float]  # by batch size
    choices: dict[int, Choice | None] = field(default_factory=dict)  # by batch size, if the memory is limited

    @property
    def recommended(self) -> tuple[int, float]:
        """A batch size, and seconds per step with it."""
        fitting = {size: choice.seconds for size, choice in self.choices.items() if choice is not None}
        if self.choices and not fitting:
            raise ConfigurationError(
                f"No batch size of {sorted(self.choices)} fits into --memory-gb, whichever layers are recomputed. "
                "Expected more memory, or smaller batches."
            )
        step_s = fitting or self.step_s
        size = sizing.recommended_batch_size(step_s)
        return size, step_s[size]


def measure_module(reference: str, batch_sizes: list[int], memory_gb: float | None) -> MeasuredModule:
    """Time a module's step with the batches of its loader, or with batches of these sizes."""
    from lightning_asgd.plan.timing import TrainingStep, seconds_per_step

    module, loader = module_and_loader(reference)
    step = TrainingStep(module)
    batches = {size: _batch(loader, size) for size in batch_sizes} or {_size(loader): _first(loader)}
    tensors = [p for p in module.parameters() if p.requires_grad]
    tensors += [b for b in module.buffers() if b.is_floating_point()]
    exchanged = sum(t.nbytes for t in tensors)
    if memory_gb is None:
        return MeasuredModule(exchanged, {size: seconds_per_step(step, batch) for size, batch in batches.items()})
    from torch import OutOfMemoryError

    from lightning_asgd.plan.layer_profile import profile_step

    check_solver()
    beside = sizing.WORKER_VECTORS * exchanged if step.device.type == "cpu" else 0
    step_s: dict[int, float] = {}
    choices: dict[int, Choice | None] = {}
    for size, batch in batches.items():
        try:
            profile = profile_step(step, batch, beside)
        except OutOfMemoryError:
            step_s[size], choices[size] = math.nan, None
        else:
            step_s[size], choices[size] = profile.seconds, choose_ways(profile, memory_gb * 1e9)
    return MeasuredModule(exchanged, step_s, choices)


def _size(loader: Any) -> int:
    if not getattr(loader, "batch_size", None):
        raise ConfigurationError(f"{loader!r} has no batch_size. Expected a loader with one, or batch_sizes.")
    return int(loader.batch_size)


def _first(loader: Any) -> Any:
    for batch in loader:
        return batch
    raise ConfigurationError(f"{loader!r} is empty. Expected at least one batch.")


def _batch(loader: Any, size: int) -> Any:
    """The dataset's first samples, over and over if there are not enough."""
    from torch.utils.data import IterableDataset

    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError(
            f"{dataset!r} cannot be indexed, so batch_sizes={size} cannot be tried. Expected a map-style dataset."
        )
    if not len(dataset):
        raise ConfigurationError(f"{dataset!r} is empty. Expected at least one sample.")
    return loader.collate_fn([dataset[i % len(dataset)] for i in range(size)])


def batch_table(measured: MeasuredModule, recommended: int) -> Table:
    """Seconds per step and, if the memory is limited, memory by batch size."""
    limited = ("memory", "layers recomputed") if measured.choices else ()
    made = table("Batch size, measured", "samples", "seconds per step", "samples/s", *limited, "")
    for size, seconds in measured.step_s.items():
        mark = "recommended" if size == recommended and len(measured.step_s) > 1 else ""
        if measured.choices and (choice := measured.choices[size]) is None:
            why = "out of memory" if math.isnan(seconds) else "does not fit"
            made.add_row(f"{size:,}", "", "", why, "", "")
            continue
        cells: list[str] = []
        if measured.choices and choice is not None:
            seconds = choice.seconds
            cells = [in_bytes(choice.memory), f"{len(choice.named(RECOMPUTED))} of {len(choice.ways)}"]
        made.add_row(f"{size:,}", f"{seconds:.4g}", f"{size / seconds:,.0f}", *cells, mark)
    return made


def print_choice(output: Any, choice: Choice | None) -> None:
    """Say how a module is made to recompute the layers that were chosen."""
    names = [] if choice is None else choice.named(RECOMPUTED)
    if names:
        output.print("\nTo recompute these layers, call this at the end of the module's __init__:\n")
        output.print("  from lightning_asgd.plan.layer_profile import recompute")
        output.print(f"  recompute(self, {names})\n", soft_wrap=True)
