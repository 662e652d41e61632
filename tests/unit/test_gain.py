"""Longer steps of optimizers whose steps do not grow with their gradients."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_asgd.gain import Gain
from lightning_asgd.gain.estimate import MomentumSignal, Signal, signal_of

SIZE = 4000
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    "capturable": lambda p: torch.optim.Adam(p, torch.tensor(1e-3)),
    "fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-3),
}


def train(optimizer: torch.optim.Optimizer, weights: Tensor, steps: int, noise: float, signal: float = 1.0) -> None:
    """Steps with gradients of so much noise; the last one's stays."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        weights.grad = signal + noise * torch.randn(weights.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("signal", "noise", "share"), [(1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 2.0, 0.2)])
@pytest.mark.parametrize("steps", [2, 11, 400])
def test_the_share_of_signal(kind: str, signal: float, noise: float, share: float, steps: int) -> None:
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizer = KINDS[kind]([weights])
    train(optimizer, weights, steps, noise, signal)
    found = Signal()
    found.add(optimizer.param_groups, optimizer.state)
    assert found.above / found.span == pytest.approx(share, abs=0.05 if steps > 100 else 0.2)
    expected = 1 / math.sqrt(share + (1 - share) / 16)
    assert found.gain(16) == pytest.approx(expected, rel=0.15 if steps > 100 else 0.5)
    assert found.gain(1) == 1.0


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2, without decay."""

    def __init__(self, params: Any, lr: float, maximize: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p in group["params"]:
            gradient = -p.grad if group["maximize"] else p.grad
            mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            p.sub_(group["lr"] * (0.9 * mean + 0.1 * gradient).sign())
            mean.lerp_(gradient, 0.01)


MUON: Any = getattr(torch.optim, "Muon", None)  # torch has it since 2.9
FIXED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Lion": lambda p: Lion(p, 1e-3),
    "Lion that ascends": lambda p: Lion(p, 1e-3, maximize=True),
}
if MUON is not None:
    FIXED["Muon"] = lambda p: MUON(p, 1e-3, 0.0)
    FIXED["Muon, no Nesterov"] = lambda p: MUON(p, 1e-3, 0.0, nesterov=False)


@pytest.mark.parametrize("kind", FIXED)
@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_the_mean_of_steps_of_one_size_is_as_much_shorter_than_ddps(kind: str, noise: float) -> None:
    """Along the signal."""
    workers, generator = 16, torch.Generator().manual_seed(0)
    signal = torch.randn(48, 48, generator=generator)
    all_weights = [nn.Parameter(torch.zeros(48, 48)) for _ in range(workers + 1)]  # the last are DDP's
    optimizers = [FIXED[kind]([weights]) for weights in all_weights]
    signals = [signal_of(optimizer) for optimizer in optimizers[:-1]]
    for step in range(300 if "Lion" in kind else 120):
        for weights in all_weights[:-1]:
            weights.grad = signal + noise * torch.randn(48, 48, generator=generator)
        all_weights[-1].grad = torch.stack([weights.grad for weights in all_weights[:-1]]).mean(0)  # type: ignore[misc]
        before = [weights.detach().clone() for weights in all_weights]
        if step > 60 and step % 10 == 0:
            for found, optimizer in zip(signals, optimizers, strict=False):
                assert isinstance(found, MomentumSignal)
                found.add(optimizer.param_groups, optimizer.state)
        for optimizer in optimizers:
            optimizer.step()
    along = [abs(float(((new.detach() - old) * signal).sum())) for new, old in zip(all_weights, before, strict=True)]
    shorter = along[-1] / (sum(along[:-1]) / workers)
    assert statistics.mean(found.gain(workers) for found in signals if found) == pytest.approx(shorter, rel=0.12)


@pytest.mark.parametrize("kind", FIXED)
def test_steps_of_one_size_are_longer_and_the_rate_is_the_users(kind: str) -> None:
    weights = nn.Parameter(torch.zeros(100, 120))
    optimizer = FIXED[kind]([weights])
    gain = Gain(lambda: 4.0)
    gain.watch([optimizer])
    moved = []
    for step in range(60):
        before = weights.detach().clone()
        weights.grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        moved.append(float((weights.detach() - before).norm()))
        assert optimizer.param_groups[0]["lr"] == 1e-3
    assert gain.latest == pytest.approx(2.0, rel=0.25)  # of pure noise
    assert moved[-1] == pytest.approx(gain.latest * moved[0], rel=0.1)  # the first step has none


class SOAP(torch.optim.RMSprop):
    """Vyas et al. 2024, without rotations: what it keeps and its decoupled decay are not looked at here."""


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "Adadelta", "Adafactor", "Adamax", "SOAP"])
@pytest.mark.parametrize(("signal", "noise", "share"), [(1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 2.0, 0.2)])
def test_without_a_running_mean_two_gradients_tell_the_share(
    kind: str, signal: float, noise: float, share: float
) -> None:
    weights, other = nn.Parameter(torch.zeros(100, 120)), nn.Parameter(torch.zeros(3))  # the other has no gradient
    optimizer = getattr(torch.optim, kind, SOAP)([weights, other], lr=1e-3)
    gain = Gain(lambda: 16.0)
    gain.watch([optimizer])
    train(optimizer, weights, 120, noise, signal)
    assert gain.latest == pytest.approx(1 / math.sqrt(share + (1 - share) / 16), rel=0.12)
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("value", [None, 0.0, 1e30, math.nan])
def test_gradients_that_are_missing_or_not_finite_say_nothing(value: float | None) -> None:
    weights = nn.Parameter(torch.zeros(100, 120))
    optimizer = FIXED["Lion"]([weights])
    train(optimizer, weights, 2, 1.0)
    weights.grad = None if value is None else torch.full((100, 120), value)
    found = MomentumSignal()
    found.add(optimizer.param_groups, optimizer.state)
    assert found.gain(4) == 1.0


def test_only_gradients_and_means_that_fit_together_count() -> None:
    """Not zeros, sparse gradients, means of another shape, Adam's, nor those of groups without a momentum."""
    weights = [nn.Parameter(torch.zeros(100, 120)) for _ in range(6)]
    for parameter in weights:
        parameter.grad = torch.ones(100, 120)
    weights[1].grad = torch.zeros(100, 120)
    weights[2].grad = torch.ones(100, 120).to_sparse()
    state: dict[Any, dict[str, Any]] = {parameter: {"exp_avg": torch.ones(100, 120)} for parameter in weights}
    state[weights[3]]["exp_avg"] = torch.ones(100, 1)
    state[weights[4]] = {"exp_avg": -torch.ones(100, 120), "exp_avg_sq": torch.ones(100, 120)}
    state[weights[5]]["exp_avg"] = -torch.ones(100, 120)
    others = [{"params": weights[5:], **about} for about in ({}, {"betas": None}, {"betas": (0.9,)}, {"momentum": "x"})]
    found = MomentumSignal()
    found.add([*others, {"params": weights[:5], "betas": (0.9, 0.99)}], state)
    assert found.above == pytest.approx(1.0)


def test_nothing_is_known_before_the_second_step_nor_of_other_optimizers() -> None:
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD([weights], 0.1, momentum=0.9)]
    optimizers.append(torch.optim.AdamW([weights], betas=(0.0, 0.9)))
    for optimizer, steps in [*zip(optimizers, (5, 5), strict=True), (torch.optim.Adam([weights]), 1)]:
        train(optimizer, weights, steps, 1.0)
        found = Signal()
        found.add(optimizer.param_groups, optimizer.state)
        assert found.gain(16) == 1.0


def test_elements_without_gradients_say_nothing() -> None:
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.Adam([weights])
    for _ in range(50):
        weights.grad = torch.randn(SIZE) * (torch.arange(SIZE) < SIZE // 4)
        optimizer.step()
    found = Signal()
    found.add(optimizer.param_groups, optimizer.state)
    assert found.gain(4) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_are_longer_and_the_rate_is_the_users(kind: str) -> None:
    """The same states and gradient: a step with the gain is as much longer."""
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizer = KINDS[kind]([weights])
    train(optimizer, weights, 50, 1.0, 0.0)
    plain, longer = copy.deepcopy((weights, optimizer)), copy.deepcopy((weights, optimizer))
    gain = Gain(lambda: 4.0)
    gain.watch([longer[1]])
    moved = []
    for parameter, its in (plain, longer):
        (its.param_groups[0]["params"],) = ([parameter],)
        before = parameter.detach().clone()
        decay = its.param_groups[0].get("weight_decay", 0.0)
        parameter.grad = torch.ones(SIZE)
        its.step()
        moved.append(parameter.detach() - before)
        assert float(its.param_groups[0]["lr"]) == pytest.approx(1e-3)
        assert its.param_groups[0].get("weight_decay", 0.0) == decay
    assert gain.latest == pytest.approx(2.0, rel=0.2)
    assert torch.allclose(moved[1], gain.latest * moved[0], rtol=2e-2, atol=1e-6)


def test_states_of_any_kind_are_read() -> None:
    """Complex ones; of half precision; of rows with sparse gradients, of which nothing is known."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(SIZE, dtype=dtype)) for dtype in (torch.complex64, torch.bfloat16)]
    optimizer = torch.optim.Adam(parameters)
    for _ in range(50):
        for parameter in parameters:
            parameter.grad = torch.randn(SIZE, dtype=parameter.dtype, generator=generator)
        optimizer.step()
    found = Signal()
    found.add(optimizer.param_groups, optimizer.state)
    assert found.gain(4) == pytest.approx(2.0, rel=0.15)
    table = nn.Embedding(10, 4, sparse=True)
    rows = torch.optim.SparseAdam(table.parameters())
    for _ in range(5):
        rows.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        rows.step()
    found = Signal()
    found.add(rows.param_groups, rows.state)
    assert found.gain(4) == 1.0


@pytest.mark.parametrize(("make", "decoupled"), [(torch.optim.AdamW, 1), (torch.optim.Adam, 0), (MUON, 1), (SOAP, 1)])
def test_the_decay_of_weights_is_as_without_where_it_is_apart(make: Any, decoupled: int) -> None:
    if make is None:
        pytest.skip("torch has Muon since 2.9")
    weights = nn.Parameter(torch.ones(40, SIZE // 40))
    optimizer = make([weights], 1e-3, weight_decay=0.5)
    gain, seen = Gain(lambda: 4.0), []
    # Hooks run in the order of registration: this one before the decay is restored.
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["weight_decay"]))
    gain.watch([optimizer])
    train(optimizer, weights, 50, 1.0, 0.0)
    assert gain.latest > 1.5
    assert seen[-1] == pytest.approx(0.5 / gain.latest if decoupled else 0.5)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_closure_sees_the_users_rate_and_may_set_it() -> None:
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.Adam([weights], 1.0)
    gain = Gain(lambda: 4.0)
    gain.watch([optimizer])
    group, rates = optimizer.param_groups[0], itertools.count(1)
    for step in rates:
        if step > 30:
            break

        def closure(step: int = step) -> float:
            assert group["lr"] == max(1, step - 1)
            group["lr"] = step
            weights.grad = torch.randn(SIZE)
            return 7.0

        assert optimizer.step(closure) == 7.0
        assert group["lr"] == step
    assert gain.latest == pytest.approx(2.0, rel=0.3)


def test_a_step_that_fails_leaves_the_users_rate_for_the_next() -> None:
    weights = nn.Parameter(torch.zeros(SIZE))

    class Fails(torch.optim.Adam):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("no step")
            return super().step(closure)

    optimizer = Fails([weights], 1e-3)
    gain = Gain(lambda: 4.0)
    gain.watch([optimizer])
    train(optimizer, weights, 30, 1.0, 0.0)
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    optimizer.fails = False
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_one_worker_trains_the_same_bits() -> None:
    found = []
    for watched in (False, True):
        weights = nn.Parameter(torch.zeros(SIZE))
        optimizer = torch.optim.AdamW([weights], 1e-2)
        if watched:
            Gain(lambda: 1.0).watch([optimizer])
        train(optimizer, weights, 30, 1.0)
        found.append(weights.detach())
    assert torch.equal(*found)


def test_it_leaves_optimizers_as_they_were() -> None:
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.Adam([weights])
    gain = Gain(lambda: 4.0)
    gain.watch([optimizer, optimizer])
    gain.close()
    train(optimizer, weights, 30, 1.0, 0.0)
    assert gain.latest == 0.0
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_step_that_calls_its_base_class_is_lengthened_once() -> None:
    """torch calls the hooks around both."""

    class Calls(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    weights = nn.Parameter(torch.zeros(SIZE))
    torch.optim.Adam([weights])  # hooks are put around a class's step when it is first used
    optimizer = Calls([weights], 1e-3)
    gain, generator = Gain(lambda: 4.0), torch.Generator().manual_seed(0)
    gain.watch([optimizer])

    def closure() -> float:
        weights.grad = torch.randn(SIZE, generator=generator)
        return 0.0

    for _ in range(12):
        before = weights.detach().clone()
        optimizer.step(closure)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert float((weights - before).detach().abs().max()) < 3 * 1e-3


def test_groups_may_share_a_rate_that_is_a_tensor() -> None:
    weights = [nn.Parameter(torch.zeros(SIZE)) for _ in range(2)]
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW([{"params": w, "lr": rate} for w in weights], lr=rate, foreach=False)
    gain, seen = Gain(lambda: 4.0), []
    optimizer.register_step_post_hook(lambda *_: seen.append(float(rate)))  # before the restore
    gain.watch([optimizer])
    for _ in range(12):
        for parameter in weights:
            parameter.grad = torch.randn(SIZE)
        optimizer.step()
        assert float(rate) == pytest.approx(1e-3)
    assert 1.5e-3 < max(seen) <= 2e-3 + 1e-6


def test_a_hook_that_lowers_the_rate_lowers_the_users() -> None:
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.Adam([weights], 1e-3)
    gain = Gain(lambda: 4.0)
    gain.watch([optimizer])
    train(optimizer, weights, 1, 1.0)

    def lower(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    optimizer.register_step_pre_hook(lower)
    train(optimizer, weights, 1, 1.0)
    before = optimizer.param_groups[0]["lr"]
    train(optimizer, weights, 10, 1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(before * 0.9**10)
    assert gain.latest > 1


def test_the_end_of_a_fit_restores_the_rate_after_a_step_that_failed() -> None:
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.Adam([weights], 1e-3)
    gain = Gain(lambda: 4.0)
    gain.watch([optimizer])
    train(optimizer, weights, 30, 1.0, 0.0)

    def fail(*_: Any) -> None:
        raise RuntimeError("no step")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    gain.close()
    assert optimizer.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("scalar", [False, True])
def test_other_optimizers_with_states_of_these_names_take_their_own_steps(scalar: bool) -> None:
    """LAMB, and NovoGrad with one square for a whole tensor; the latter as a kind of Adam, too."""

    def step(self: Any, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["exp_avg"] = parameter.grad.clone()
            state["exp_avg_sq"] = parameter.grad.square().sum() if scalar else parameter.grad.square()

    kind = type("NovoAdam" if scalar else "Lamb", (torch.optim.Optimizer,), {"step": step})
    weights = nn.Parameter(torch.zeros(SIZE))
    optimizer = kind([weights], {"lr": 1e-3, "betas": (0.9, 0.999)})
    gain = Gain(lambda: 4.0)
    gain.watch([optimizer])
    train(optimizer, weights, 12, 1.0, 0.0)
    assert gain.latest == 0.0
