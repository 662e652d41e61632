"""Steps of optimizers that the Trainer does not know, as that inside an optimizer for sharpness-aware minimisation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asgd import ASGDStrategy
from lightning_asgd.algorithms import Algorithm, Downpour, LocalSGD
from tests.lightning.models import loader, trainer
from tests.lightning.test_programs_of_others import Manual, told


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimisation: its second half is the step of an optimizer inside, as in the usual code."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.up = inner, {}  # type: ignore[var-annotated]

    @torch.no_grad()
    def climb(self) -> None:
        gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        self.up = {p: g * (0.05 / norm) for p, g in gradients.items()}
        for p, up in self.up.items():
            p.add_(up)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for p, up in self.up.items():
            p.sub_(up)
        self.inner.step()
        self.zero_grad()


class SharpnessAware(Manual):
    """The Trainer knows the outer optimizer; for comparison, it ``knows_inner``."""

    def __init__(self, folder: Path, *, knows_inner: bool = False) -> None:
        super().__init__(folder)
        self.net, self.knows_inner = torch.nn.Sequential(torch.nn.Linear(8, 1)), knows_inner  # no batch norm

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.last.append(self.trainer.is_last_batch)
        self.manual_backward(self.loss(batch))
        self.sharp.climb()
        self.manual_backward(self.loss(batch))
        self.sharp.descend()

    def configure_optimizers(self) -> Any:
        self.sharp = Sharp(torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9))
        return self.sharp.inner if self.knows_inner else self.sharp


@pytest.mark.parametrize(("workers", "algorithm"), [(2, LocalSGD())])
def test_steps_of_an_optimizer_that_the_trainer_does_not_know_count(
    workers: int, algorithm: Algorithm, tmp_path: Path
) -> None:
    results = []
    for knows_inner in (True, False):
        torch.manual_seed(0)
        module = SharpnessAware(tmp_path, knows_inner=knows_inner)
        strategy = ASGDStrategy(algorithm=algorithm, nsync=2, data="split", start_method="fork")
        trainer(tmp_path, strategy, devices=workers).fit(module, loader(128))
        results.append(told(tmp_path))
    usual, found = results
    assert len({each["digest"] for each in found}) == 1
    assert [each["steps"] for each in found] == [2 * 16 // workers] * workers
    assert all(each["pushes"] > 2 for each in found)  # not only at the end of an epoch
    assert [each["digest"] for each in found] == [each["digest"] for each in usual]


def test_leased_batches_of_such_an_optimizer_are_pushed(tmp_path: Path) -> None:
    trainer(tmp_path, ASGDStrategy(nsync=2, start_method="fork")).fit(SharpnessAware(tmp_path), loader(128))
    found = told(tmp_path)
    assert len({each["digest"] for each in found}) == 1
    assert sum(each["steps"] for each in found) == 2 * 16
    assert sum(each["pushes"] for each in found) > 2 * 2  # not only at the end of an epoch


def test_gradients_of_such_an_optimizer_are_not_pushed_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = ASGDStrategy(algorithm=Downpour(), nsync=2)
    trainer(tmp_path, strategy, devices=1).fit(SharpnessAware(tmp_path), loader(128))
    assert told(tmp_path)[0]["steps"] == 0
    said = [each.getMessage() for each in caplog.records if "has changed weights" in each.getMessage()]
    assert len(said) == 1
    assert "Downpour pushes gradients, and those of such a step are not pushed" in said[0]


class Clamped(Manual):
    """Changes weights otherwise than by steps: it clamps them, has a teacher, and rows of a bounded length."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, every=4)
        self.rows = torch.nn.Embedding(4, 8, max_norm=0.5)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return super().loss((x + self.rows(torch.arange(len(x)) % 4), y))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(-0.5, 0.5)


def test_other_changes_of_weights_are_no_steps(tmp_path: Path) -> None:
    trainer(tmp_path, ASGDStrategy(nsync=2), devices=1).fit(Clamped(tmp_path), loader(128))
    assert told(tmp_path)[0]["steps"] == 2 * 4
