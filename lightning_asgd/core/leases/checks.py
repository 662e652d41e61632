"""Whether workers mean the same epoch, and whether a request is valid. Pure."""

from __future__ import annotations

from lightning_asgd.core.foundation.errors import ProtocolError
from lightning_asgd.core.foundation.ranges import are_in_order
from lightning_asgd.core.protocol import Epoch, LeaseRequest


def check_epoch(epoch: Epoch, other: Epoch, worker: int) -> None:
    """Raise if a worker opens another epoch under the same key."""
    if other.order != epoch.order:
        raise ProtocolError(
            f"Worker {worker} has another order of samples for epoch {other.key} than the others. Expected the "
            "same: give your sampler a generator with the same seed on all workers, or pass data='split' to the "
            "strategy."
        )
    if other.step != epoch.step:
        raise ProtocolError(
            f"Worker {worker} counts {other.step} samples per optimizer step in epoch {other.key}, the others "
            f"{epoch.step}. Expected the same accumulate_grad_batches on every worker; batch sizes may differ."
        )
    if (other.units, other.ends, other.shards) != (epoch.units, epoch.ends, epoch.shards):
        raise ProtocolError(
            f"Worker {worker} has {other.units} units in sync intervals that end at {other.ends[-3:]} for epoch "
            f"{other.key}; the others have {epoch.units}, {epoch.ends[-3:]}. Expected the same data set "
            "and Trainer arguments on every worker, or data='split'."
        )


def check_request(epoch: Epoch, request: LeaseRequest) -> None:
    """Raise unless a request can be one of this epoch."""
    if not all(are_in_order([each], epoch.numbers) for each in request.returned):
        raise ProtocolError(
            f"Worker {request.worker} returns units {request.returned} of epoch {epoch.key}. Expected ranges of its "
            f"{epoch.numbers} numbers."
        )
    if not 0 <= request.segment < len(epoch.ends):
        raise ProtocolError(
            f"Worker {request.worker} asks for units after sync interval {request.segment} of epoch "
            f"{epoch.key}. Expected at least 0, and less than {len(epoch.ends)}."
        )
