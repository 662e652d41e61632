"""A module's tensors by name: which are shared how, digests, and values that are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_asgd.core.worker.module_state import (
    digest_of,
    fixed_tensors,
    named_state,
    on_cpu,
    persistent_buffers,
    take_values,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("temporary", torch.ones(1), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("unset", None)


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def test_which_tensors_are_shared_how() -> None:
    model = Model()
    assert list(persistent_buffers(model)) == ["scale", "mask", *(f"block.1.{name}" for name in STATISTICS)]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert list(fixed_tensors(model, trained)) == ["frozen", "temporary"]
    assert list(fixed_tensors(model, ())) == [*dict(model.named_parameters()), "temporary"]
    assert {*named_state(model)} == {*fixed_tensors(model, ()), *persistent_buffers(model)}


def test_names_are_those_of_the_module_also_where_its_state_dict_has_others() -> None:
    model = Model()
    model.block = checkpoint_wrapper(model.block)  # type: ignore[assignment]
    assert "block.1.running_mean" in model.state_dict()
    found = persistent_buffers(model)
    assert {f"block._checkpoint_wrapped_module.1.{name}" for name in STATISTICS} <= found.keys()
    assert take_values(model, {name: torch.full_like(value, 5) for name, value in found.items()}) == []
    assert model.state_dict()["block.1.running_mean"].tolist() == [5.0, 5.0]


def test_a_buffer_without_a_shape_is_left_out_until_it_has_one() -> None:
    model = nn.LazyBatchNorm1d()
    assert list(persistent_buffers(model)) == ["num_batches_tracked"]
    assert take_values(model, {"running_mean": torch.tensor([1.0, 2.0])}) == []
    assert model.running_mean.tolist() == [1.0, 2.0]


# ---------------------------------------------------------------------- every kind of tensor

KINDS: dict[str, Any] = {
    "float": lambda: torch.tensor([1.0, -0.0, torch.nan, torch.inf]),
    "scalar": lambda: torch.tensor(3),
    "bool": lambda: torch.tensor([True, False]),
    "bytes": lambda: torch.arange(5, dtype=torch.uint8),
    "bfloat16": lambda: torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
    "float16": lambda: torch.tensor([[1.5], [2.0]], dtype=torch.float16),
    "float8": lambda: torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn),
    "complex": lambda: torch.tensor([1 + 2j, -3j]),
    "conjugated": lambda: torch.tensor([1 + 2j, -3j]).conj(),
    "empty": lambda: torch.empty(0, 3),
    "strided": lambda: torch.arange(6.0).view(2, 3).t(),
    "every second": lambda: torch.arange(7.0)[::2],
    "single": lambda: torch.tensor([[5.0, 6.0], [7.0, 8.0]])[:1, ::2],  # of any stride
    "expanded": lambda: torch.ones(1).expand(4),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 0, torch.qint8),
    "per channel": lambda: torch.quantize_per_channel(
        torch.ones(2, 2), torch.tensor([0.5, 0.25]), torch.zeros(2, dtype=torch.int64), 0, torch.qint8
    ),
    "inference": lambda: in_inference_mode(),
}


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.tensor([3.0, 4.0])


def plain(tensor: Tensor) -> Tensor:
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.to_dense().clone() if tensor.layout is not torch.strided else tensor.resolve_conj()
    return tensor.float() if tensor.dtype is torch.float8_e4m3fn else tensor


def same(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
    return alike and torch.allclose(plain(one), plain(other), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_is_that_of_name_shape_dtype_and_values(kind: str) -> None:
    tensor = KINDS[kind]()
    digest = digest_of({"a": tensor})
    assert digest == digest_of({"a": KINDS[kind]()}) == digest_of({"a": on_cpu(tensor)})
    assert digest != digest_of({"b": tensor})
    others = [other() for name, other in KINDS.items() if name != kind]
    assert digest not in [digest_of({"a": other}) for other in others]


def test_a_digest_tells_shapes_signs_and_what_is_missing() -> None:
    assert digest_of({}) == b""
    assert digest_of({"a": torch.zeros(2, 3)}) != digest_of({"a": torch.zeros(3, 2)})
    assert digest_of({"a": torch.tensor(0.0)}) != digest_of({"a": torch.tensor(-0.0)})
    assert digest_of({"a": torch.empty(0)}) != digest_of({"a": torch.empty(0, 1)})
    assert digest_of({"a": torch.zeros(1)}) != digest_of({"a": torch.zeros(1), "b": torch.zeros(1)})


class Holding(nn.Module):
    held: Tensor

    def __init__(self, tensor: Tensor | None) -> None:
        super().__init__()
        if tensor is not None:
            self.register_buffer("held", tensor)


@pytest.mark.parametrize("mine", [*KINDS, None])
@pytest.mark.parametrize("theirs", KINDS)
def test_a_buffer_takes_any_value_whatever_it_was(theirs: str, mine: str | None) -> None:
    module, value = Holding(None if mine is None else KINDS[mine]()), KINDS[theirs]()
    assert take_values(module, {"held": value}) == []
    assert same(module.held, KINDS[theirs]())
    assert list(persistent_buffers(module)) == ["held"]
    assert module.held is not value
    assert value.layout is not torch.strided or module.held.data_ptr() != value.data_ptr() or not value.numel()


def test_one_of_the_same_form_is_written_in_place_and_one_of_another_shape_stays_the_same_tensor() -> None:
    module = Holding(torch.zeros(2))
    held, place = module.held, module.held.data_ptr()
    take_values(module, {"held": torch.ones(2)})
    assert module.held is held
    assert held.data_ptr() == place
    take_values(module, {"held": torch.ones(5)})
    assert module.held is held
    assert held.tolist() == [1.0] * 5


def test_parameters_are_written_in_place() -> None:
    module = Model()
    frozen = module.frozen
    assert take_values(module, {"frozen": torch.full((3,), 7.0)}) == []
    assert module.frozen is frozen
    assert frozen.tolist() == [7.0] * 3


def test_what_has_no_place_is_named() -> None:
    module = Holding(torch.zeros(1))
    module.other = "an attribute"  # type: ignore[assignment]
    values = {"held": torch.ones(1), "other": torch.ones(1), "missing.part": torch.ones(1)}
    assert take_values(module, values) == ["other", "missing.part"]
    assert module.held.tolist() == [1.0]
    assert module.other == "an attribute"
