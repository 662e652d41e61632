"""Steps along gradients that are late: rates for the duration of a step, and SGD's momentum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_asgd.algorithms import LayerWise
from lightning_asgd.core.algorithms.base import Run
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.layerwise.layer_gradients import LateSteps


def stepped(late: LateSteps, optimizer: Any, parameter: torch.Tensor, gradient: float) -> float:
    def closure() -> None:
        parameter.grad = torch.full_like(parameter, gradient)
        late.prepare(optimizer)

    optimizer.step(closure)
    return float(parameter.detach())


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"dampening": 0.5}, {"maximize": True}, {"foreach": True}], ids=str
)
def test_a_step_takes_momentum_and_gradient_with_the_papers_factors(delay: int, options: dict[str, Any]) -> None:
    lr, m = 0.01, 0.9
    parameter = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=m, **options)
    late = LateSteps(LayerWise(delay))
    a, b = m**delay, sum(m**i for i in range(delay))
    w, v = 1.0, None
    for number in range(5):
        gradient = 0.3 * number - 0.5
        full = (-gradient if options.get("maximize") else gradient) + options.get("weight_decay", 0.0) * w
        share = 1 - options.get("dampening", 0.0)
        v = full if v is None else m * v + share * full
        w -= lr / (delay + 1) * (a * v + b * share * full)
        found = stepped(late, optimizer, parameter, gradient)
        # Weight decay is taken at the weight after the plain step.
        assert found == pytest.approx(w, rel=1e-4 if options.get("weight_decay") else 1e-12)
        assert optimizer.param_groups[0]["lr"] == lr
    late.close()


def test_other_optimizers_and_nesterovs_momentum_only_get_smaller_rates() -> None:
    for make in (torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True)):
        ours, theirs = (torch.nn.Parameter(torch.tensor(1.0)) for _ in range(2))
        late = LateSteps(LayerWise(2))
        mine, other = make([ours], lr=0.3), make([theirs], lr=0.1)
        for gradient in (1.0, -0.5, 0.2):
            theirs.grad = torch.tensor(gradient)
            other.step()
            assert stepped(late, mine, ours, gradient) == pytest.approx(float(theirs.detach()), rel=1e-6)
        late.close()


def test_a_rate_is_restored_after_a_step_that_failed_and_one_that_a_hook_has_set_is_kept() -> None:
    parameter = torch.nn.Parameter(torch.tensor(1.0))
    rate = torch.tensor(0.4)
    optimizer = torch.optim.SGD([{"params": [parameter], "lr": rate}], lr=0.1, momentum=0.9)
    late = LateSteps(LayerWise(1))
    late.prepare(optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)
    late.restore()
    assert optimizer.param_groups[0]["lr"] is rate
    late.prepare(optimizer)
    optimizer.param_groups[0]["lr"] = 0.7
    late.close()
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert not optimizer._optimizer_step_post_hooks


def test_without_compensation_or_delay_nothing_is_changed() -> None:
    for algorithm in (LayerWise(0), LayerWise(2, compensate=False)):
        parameter = torch.nn.Parameter(torch.tensor(1.0))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        late = LateSteps(algorithm)
        assert stepped(late, optimizer, parameter, 1.0) == pytest.approx(0.9)
        assert not optimizer._optimizer_step_post_hooks


def test_optimizers_that_cannot_take_late_steps_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.tensor(1.0))
    newton = torch.optim.LBFGS([parameter])
    with pytest.raises(ConfigurationError, match=r"LayerWise\(delay=1\) was given LBFGS.*no delay"):
        LayerWise(1).check(Run(2, optimizers=[newton]))
    LayerWise(0).check(Run(2, optimizers=[newton]))
    without = torch.optim.SGD([parameter], lr=0.1)
    without.param_groups[0]["lr"] = None
    with pytest.raises(ConfigurationError, match=r"divides learning rates by 3, but SGD has none.*compensate=False"):
        LayerWise(2).check(Run(2, optimizers=[without]))
    LayerWise(2, compensate=False).check(Run(2, optimizers=[without]))
