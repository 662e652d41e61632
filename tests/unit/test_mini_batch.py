"""The mini-batch procedure: the integer program, and what is measured of a module's layers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from pytorch_lightning import LightningModule
from torch import nn

from lightning_asgd.plan.layer_profile import profile_step, recompute
from lightning_asgd.plan.mini_batch import KEPT, RECOMPUTED, StepProfile, Way, choose_ways
from lightning_asgd.plan.timing import TrainingStep

BYTES = st.integers(0, 1 << 34)
WAYS = st.lists(st.builds(Way, st.just("some"), st.floats(0, 10), BYTES, BYTES), min_size=1, max_size=3)


@hypothesis.given(layers=st.lists(WAYS, min_size=1, max_size=5), fixed=BYTES, memory=st.integers(0, 1 << 36))
def test_no_choice_that_fits_is_faster(layers: list[list[Way]], fixed: int, memory: int) -> None:
    profile = StepProfile(1.0, fixed, {str(n): ways for n, ways in enumerate(layers)})
    found = choose_ways(profile, memory)
    best = math.inf
    for ways in itertools.product(*layers):
        before = [fixed + sum(w.kept for w in ways[: n + 1]) for n in range(len(ways))]
        if max(b + w.workspace for b, w in zip(before, ways, strict=True)) <= memory * (1 - 1e-5):
            best = min(best, 1.0 + sum(w.seconds for w in ways))
    if found is None:
        assert best == math.inf
    else:
        assert found.memory <= memory
        assert found.seconds <= best + 1e-3


class Blocks(LightningModule):
    """Blocks whose inner tensors are ``width`` times as large as what is between them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64 * width), nn.Tanh(), nn.Linear(64 * width, 64)) for _ in range(4)]
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Linear(64, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.last(self.blocks(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def test_what_a_layer_keeps_is_counted_once_and_apart_from_weights() -> None:
    step = TrainingStep(Blocks(), torch.device("cpu"))
    batch = torch.randn(100, 64)
    profile = profile_step(step, batch, steps=2)
    assert list(profile.layers) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "last"]
    inner = {name: {way.name: way for way in ways} for name, ways in profile.layers.items()}
    for number in range(4):
        ways = inner[f"blocks.{number}"]
        assert ways[KEPT].kept == 4 * 100 * 512  # the output of Tanh; what enters and leaves the block is shared
        assert ways[RECOMPUTED].kept == 0
        assert ways[KEPT].workspace == 4 * 100 * 512  # the gradient of that
        assert ways[RECOMPUTED].workspace == 2 * 4 * 100 * 512
        assert ways[RECOMPUTED].seconds > 0
    assert [*inner["last"]] == [KEPT]  # it keeps its input only, which is the last block's output
    weights = sum(p.nbytes for p in step.module.parameters())
    between = 4 * 100 * 64 * 5 + 4 * 100  # the batch, what leaves the blocks, and the loss's input
    assert profile.fixed == pytest.approx(3 * weights + between, abs=64)  # weights, gradients, momentum


def test_recomputed_layers_give_the_same_gradients_and_keep_less() -> None:
    torch.manual_seed(0)
    one = Blocks()
    other = Blocks()
    other.load_state_dict(one.state_dict())
    recompute(other, ["blocks.0", "blocks.2"])
    batch = torch.randn(10, 64)
    kept = []
    for module in (one, other):
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = module.training_step(batch, 0)
        kept.append(sum(sizes.values()))
        loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert kept[1] <= kept[0] - 2 * 4 * 10 * 512


def test_a_step_that_fits_is_left_as_it_is_and_one_that_cannot_fit_is_refused() -> None:
    step = TrainingStep(Blocks(), torch.device("cpu"))
    profile = profile_step(step, torch.randn(100, 64), steps=2)
    whole = choose_ways(profile, 1e9)
    assert whole is not None
    assert not whole.named(RECOMPUTED)
    assert whole.seconds == profile.seconds
    inner = 4 * 100 * 512
    tight = choose_ways(profile, profile.fixed + 4 * inner)
    assert tight is not None
    assert len(tight.named(RECOMPUTED)) == 1  # three are kept; the gradient of one more fits
    assert choose_ways(profile, profile.fixed + 2 * inner) is not None
    assert (
        choose_ways(profile, profile.fixed + 2 * inner - 1) is None
    )  # the first is kept or recomputed, with a gradient


class Wrapped(LightningModule):
    """A network as users have it: an attribute, whose blocks are far inside."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_blocks_are_found_inside_a_network() -> None:
    import torchvision

    step = TrainingStep(Wrapped(torchvision.models.resnet18(num_classes=2)), torch.device("cpu"))
    layers = profile_step(step, torch.randn(2, 3, 32, 32), steps=1).layers
    assert [name for name in layers if name.startswith("net.layer2")] == ["net.layer2.0", "net.layer2.1"]
    assert {"net.conv1", "net.fc"} < {*layers}


def test_what_is_freed_between_layers_is_not_mistaken_for_what_comes_to_the_same_address() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
            self.block = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
            self.rest = nn.ModuleList([nn.Sequential(nn.Sequential(nn.Linear(64, 64)))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.one(x) + self.two(x))

    step = TrainingStep(Wrapped(Added()), torch.device("cpu"))
    layers = profile_step(step, torch.randn(100, 64), steps=1).layers
    assert layers["net.block"][0].kept == 4 * 100 * 64


def test_a_copied_module_keeps_its_recomputed_layers() -> None:
    import pickle

    module = Blocks()
    recompute(module, ["blocks.1"])
    once = module.blocks[1].forward
    recompute(module, ["blocks.1"])
    assert module.blocks[1].forward is once
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again.blocks(torch.ones(2, 64)), module.blocks(torch.ones(2, 64)))
