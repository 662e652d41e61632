"""One strategy object for several Trainers, of one tree or of both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.foundation.environment import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError, LaunchError
from tests.lightning.models import digest, loader
from tests.lightning.test_neighbours import check, run

OTHER = pytest.param(lightning.pytorch, marks=pytest.mark.slow)
USUALLY_ONE = [pl, OTHER]


def module_of(tree: Any) -> Any:
    class Module(tree.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.05)

    return Module()


def make(tree: Any, strategy: Any, folder: Path, **options: Any) -> Any:
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": str(folder)}
    return tree.Trainer(strategy=strategy, **{**off, **defaults, **options})


@pytest.mark.parametrize("first", USUALLY_ONE)
@pytest.mark.parametrize("second", [pl, lightning.pytorch])
def test_a_strategy_goes_from_trainer_to_trainer(tmp_path: Path, first: Any, second: Any) -> None:
    strategy = ASGDStrategy(nsync=2)
    fit, module = make(first, strategy, tmp_path), module_of(first)
    fit.fit(module, loader(64))
    trained = strategy.stats
    assert trained.steps == 8
    with pytest.raises(Exception, match="accelerator"):  # a Trainer that cannot be made takes nothing
        make(second, strategy, tmp_path, accelerator="nonsense")
    assert fit.strategy is strategy
    assert fit.lightning_module is module

    predict = make(second, strategy, tmp_path)
    assert predict.strategy is strategy
    other = module_of(second)
    other.load_state_dict(module.state_dict())
    predicted = torch.cat(predict.predict(other, loader(64)))
    x = torch.cat([batch[0] for batch in loader(64)])
    with torch.no_grad():
        assert torch.equal(predicted, other.net(x))
    assert predict.lightning_module is other
    again = make(second, strategy, tmp_path)
    again.fit(other, loader(64))
    assert again.validate(other, loader(64))[0]["val"] < 10
    assert strategy.stats is not trained

    # The first Trainer has all that it had, and can go on.
    assert fit.strategy is not strategy
    assert fit.lightning_module is module
    assert fit.strategy.stats is trained
    before = digest(module)
    fit.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(saved["net.weight"], module.net.weight)
    fit.fit_loop.max_epochs = 2
    fit.fit(module, loader(64))
    assert digest(module) != before


@pytest.mark.parametrize(
    ("first", "refused"),
    [
        ("ASGDStrategy()", "devices=2 was given. An earlier Trainer has started 1 process(es), the workers of all"),
        ("'ddp'", "torch.distributed has 1 process(es), probably those of an earlier Trainer"),
    ],
    ids=["A-SGD", "DDP"],
)
def test_more_devices_than_an_earlier_trainer_has_started_are_refused_at_once(
    tmp_path: Path, first: str, refused: str
) -> None:
    script = f"""
fit("one", {first}, devices=1)
try:
    fit("two", ASGDStrategy())
except Exception as error:
    print("refused:", error)
"""
    said = run(tmp_path, script, seconds=60)
    assert said.count("refused:") == 1
    assert refused in said
    assert "start_method='spawn'" in said


@pytest.mark.parametrize("tree", USUALLY_ONE)
def test_arguments_are_those_of_the_strategy_or_of_the_newest_trainer(tmp_path: Path, tree: Any) -> None:
    environment = type(make(tree, ASGDStrategy(), tmp_path).strategy.cluster_environment)()
    double = tree.plugins.DoublePrecision()
    strategy = ASGDStrategy(cluster_environment=environment, start_method="fork")
    first = make(tree, strategy, tmp_path, devices=2, plugins=[double])
    assert (first.world_size, first.precision) == (2, "64-true")
    second = make(tree, strategy, tmp_path, devices=1)
    assert (second.world_size, second.precision, second.num_devices) == (1, "32-true", 1)
    assert second.strategy.cluster_environment is environment
    assert first.num_devices == 2
    assert first.precision_plugin is double
    assert first.strategy.launcher._strategy is first.strategy
    with pytest.raises(Exception, match="cluster_environment set through both strategy class and plugins"):
        make(tree, strategy, tmp_path, plugins=[environment])


@pytest.mark.parametrize("tree", USUALLY_ONE)
def test_the_strategy_of_a_trainer_that_runs_is_not_taken(tmp_path: Path, tree: Any) -> None:
    strategy = ASGDStrategy()

    class Steals(tree.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, *args: Any) -> None:
            with pytest.raises(ConfigurationError, match=r"ASGDStrategy of a Trainer that is running fit\. Expected"):
                make(tree, strategy, tmp_path)

    fit = make(tree, strategy, tmp_path, callbacks=[Steals()])
    fit.fit(module_of(tree), loader(64))
    assert fit.strategy is strategy


@pytest.mark.parametrize("transport", ["rpc", "zmq"])
def test_the_environment_may_be_restored_between_two_fits_and_the_secret_may_not_change(
    tmp_path: Path, transport: str
) -> None:
    strategy = ASGDStrategy(nsync=2, transport=transport)
    for _ in range(2):
        with mock.patch.dict(os.environ):  # what test suites do, Lightning's among them
            for name in (SECRET_ENV, "LIGHTNING_ASGD_OWN_SECRET"):
                os.environ.pop(name, None)
            make(pl, strategy, tmp_path).fit(module_of(pl), loader(64))
            assert strategy.stats.steps == 8
    refused = pytest.raises(LaunchError, match=f"{SECRET_ENV} has changed since an earlier job")
    with mock.patch.dict(os.environ, {SECRET_ENV: "another that is long enough"}), refused:
        make(pl, strategy, tmp_path).fit(module_of(pl), loader(64))
    make(pl, strategy, tmp_path).fit(module_of(pl), loader(64))


@pytest.mark.parametrize("transport", ["rpc", pytest.param("zmq", marks=pytest.mark.slow)])
def test_a_forked_process_trains_by_itself(tmp_path: Path, transport: str) -> None:
    script = f"""
import multiprocessing, os
def child(name):
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    fit(name, ASGDStrategy(nsync=2, transport={transport!r}), devices=1)
fit("0", ASGDStrategy(nsync=2, transport={transport!r}), devices=1)
process = multiprocessing.get_context("fork").Process(target=child, args=("1",))
process.start()
process.join(100)
assert process.exitcode == 0, process.exitcode
pid = os.fork()
if not pid:
    raise SystemExit(0)  # with all that is registered for the exit
assert os.waitpid(pid, 0)[1] == 0
fit("2", ASGDStrategy(nsync=2, transport={transport!r}), devices=1)
"""
    run(tmp_path, script)
    assert {path.name for path in tmp_path.glob("*.json")} == {"0-0.json", "1-0.json", "2-0.json"}


def test_with_workers_that_run_the_script(tmp_path: Path) -> None:
    script = """
strategy = ASGDStrategy(nsync=2)
first = fit("0", strategy)
trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
module = Keeping("x")
module.predict_step = lambda batch, batch_idx: module.net(batch[0])
with torch.no_grad():
    module.net.weight.fill_(1.0)
predicted = torch.cat(trainer.predict(module, DataLoader(TensorDataset(torch.ones(6, 4)), 1)))
assert len(predicted) == 3, predicted
fit("1", strategy)
assert first.world_size == 2 and first.lightning_module.name == "0"
"""
    run(tmp_path, script)
    check(tmp_path, "0", "1")
