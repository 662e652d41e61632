"""Which of a module's tensors are exchanged."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_asgd.numerics import checksum
from lightning_asgd.worker.worker_setup import exchanged_tensors, named_state


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("temporary", torch.ones(1), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))


def buffers_of(module: nn.Module) -> set[str]:
    return set(exchanged_tensors(module, named_state(module))[1])


def test_persistent_and_finite_buffers_are_exchanged() -> None:
    statistics = {f"block.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert buffers_of(Model()) == {"scale", *statistics}


def test_buffers_that_a_state_dict_renames_are_exchanged() -> None:
    model = Model()
    model.block = checkpoint_wrapper(model.block)  # type: ignore[assignment]
    assert "block.1.running_mean" in model.state_dict()
    inside = "block._checkpoint_wrapped_module.1."
    assert buffers_of(model) == {"scale", *(inside + n for n in ("running_mean", "running_var", "num_batches_tracked"))}


def test_checksums_differ_with_the_bits() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64):
        ones = torch.ones(5, 3).to(dtype)
        assert checksum(ones) == checksum(ones.clone())
        assert checksum(ones.T) == checksum(ones.T.contiguous())
        other = ones.clone()
        other[4, 2] = 0
        assert checksum(other) != checksum(ones)
    assert checksum(torch.tensor(2.0)) != checksum(torch.tensor(-2.0))
    assert checksum(torch.empty(0)) == 0
