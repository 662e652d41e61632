"""Sampling from a posterior with a real Trainer: samples reach the main process, and predictions average over them."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_asgd import Advanced, ASGDStrategy, averaged_prediction
from lightning_asgd.algorithms import SGMCMC
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.sampling.optim import SGHMC
from tests.lightning.models import Regression, dataset, loader, trainer


class Sampled(Regression):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out

    def configure_optimizers(self) -> Any:
        return SGHMC(self.parameters(), lr=3e-5, num_data=256, friction=0.2, weight_decay=1.0)


@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_samples_reach_the_main_process_and_predict(start_method: str, tmp_path: Path) -> None:
    devices = 2 if start_method == "fork" else 1
    rule = SGMCMC(burn_in=10, thin=4, max_samples=5)
    strategy = ASGDStrategy(nsync=2, algorithm=rule, start_method=start_method)
    module = Sampled()
    module.register_buffer("large", torch.zeros(20_000))
    trainer(tmp_path, strategy, devices=devices, max_epochs=12).fit(module, loader())
    assert len(strategy.samples) == 5
    # More than a pipe takes at once: the main process looks for results only after the workers have ended.
    assert len(pickle.dumps(strategy.samples)) > 1 << 16
    assert all(set(sample) == set(module.state_dict()) for sample in strategy.samples)
    distinct = {tuple(sample["net.3.weight"].flatten().tolist()) for sample in strategy.samples}
    assert len(distinct) == 5
    x, y = dataset().tensors
    mean = averaged_prediction(module, strategy.samples, x)
    assert float((mean - y).square().mean()) < 0.5 * float(y.var())


def test_a_run_too_short_for_a_sample_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = ASGDStrategy(nsync=4, algorithm="sgmcmc", advanced=Advanced(overlap=False))
    with caplog.at_level(logging.WARNING, "lightning_asgd"):
        trainer(tmp_path, strategy, devices=1, max_epochs=1).fit(Sampled(), loader(64))
    assert strategy.samples == []
    assert "SGMCMC kept no samples: training ended at version 2" in caplog.text


def test_an_optimizer_without_noise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="SGMCMC was given the optimizer SGD, which adds no noise"):
        trainer(tmp_path, ASGDStrategy(algorithm="sgmcmc"), devices=1).fit(Regression(), loader())
