"""Arguments of strategies: those of Lightning's, those that there are not, and configurations for ``LightningCLI``."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import logging
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_asgd import Advanced, ASGDStrategy, AsyncSGD, FabricASGDStrategy, Timeouts
from lightning_asgd.algorithms import ASGD, EASGD, LocalSGD, recipe
from lightning_asgd.compression import Float4, TopK
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.unattached import _UNNEEDED

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
KINDS = (ASGDStrategy, FabricASGDStrategy, AsyncSGD)


def loop(**options: Any) -> AsyncSGD:
    module = torch.nn.Linear(1, 1)
    return AsyncSGD(module, torch.optim.SGD(module.parameters()), **options)


MAKERS: tuple[Callable[..., Any], ...] = (ASGDStrategy, FabricASGDStrategy, loop)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"gain": False}, "gain=False. Expected advanced=Advanced(gain=False)."),
        ({"nfetch": 5}, "nfetch=5. Expected advanced=Advanced(nfetch=5)."),
        ({"n_sync": 5}, "n_sync=5. Did you mean nsync?"),
        ({"snapshot_every": 9.0}, "snapshot_every=9.0. Did you mean advanced=Advanced(snapshot_every_s=9.0)?"),
        ({"scale": "sum"}, "scale='sum' is no argument. Expected some of "),
        ({"advanced": {"gain": False}}, "advanced={'gain': False}. Expected a lightning_asgd.Advanced(...)."),
        ({"num_servers": 0}, "num_servers=0. Expected a whole number of at least 1, such as num_servers=2."),
        ({"transport": "tcp"}, "transport='tcp'. Expected 'auto', 'rpc' or 'zmq'."),
        ({"on_worker_failure": "stop"}, "on_worker_failure='stop'. Expected 'continue' or 'abort'."),
        ({"algorithm": EASGD}, "algorithm=EASGD is a class. Expected an object: EASGD()."),
        ({"algorithm": "easdg"}, "algorithm='easdg' is unknown. Did you mean 'easgd'? Expected an object such as"),
        ({"compression": TopK}, "compression=TopK is a class. Expected an object: TopK()."),
        ({"compression": "bf17"}, "compression='bf17' is unknown. Did you mean 'bf16'? Expected an object such as"),
    ],
)
def test_what_is_no_argument_is_refused_with_what_may_be_meant(
    make: Callable[..., Any], given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(text)}"):
        make(**given)


@pytest.mark.parametrize(
    ("name", "kind"), [("EASGD", EASGD), ("local-sgd", LocalSGD), ("LocalSGD", LocalSGD), ("ASGD", ASGD)]
)
def test_names_of_algorithms_may_be_written_in_other_ways(name: str, kind: type) -> None:
    assert type(ASGDStrategy(algorithm=name).options.config.algorithm) is kind


def test_names_of_compressions_may_be_written_in_other_ways() -> None:
    assert ASGDStrategy(compression="4-Bit").options.config.compression == Float4()


@pytest.mark.parametrize("kind", KINDS)
def test_choices_are_in_the_signature(kind: Any) -> None:
    hints = get_type_hints(kind.__init__)
    names = {"transport", "on_worker_failure"}
    if kind is ASGDStrategy:
        names |= {"data", "start_method"}
    assert {name for name, hint in hints.items() if get_origin(hint) is Literal} == names
    defaults = inspect.signature(kind).parameters
    assert all(defaults[name].default in get_args(hints[name]) for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_arguments_of_ddp_are_not_needed_or_refused_by_name(package: str) -> None:
    ddp = importlib.import_module(f"{package}.strategies").DDPStrategy
    names = {name for kind in (ddp, DistributedDataParallel) for name in inspect.signature(kind).parameters}
    assert names > {*_UNNEEDED}
    for name in names - set(inspect.signature(ASGDStrategy).parameters) - set(ASGDStrategy()._given):
        if name in _UNNEEDED:
            ASGDStrategy(**{name: True})
            with pytest.raises(ConfigurationError, match=rf"^{name}=True\. Expected island=DDPStrategy\({name}=True\)"):
                ASGDStrategy(island=2, **{name: True})
        else:
            with pytest.raises(ConfigurationError, match=rf"^{name}=True is an argument of DDP's\. Expected "):
                ASGDStrategy(**{name: True})
    with pytest.raises(ConfigurationError, match=r"Expected timeouts=Timeouts\(collective_s=...\)\.$"):
        ASGDStrategy(timeout=60)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_argument_of_ddp_that_is_not_needed_is_named_once(package: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, f"{package}.utilities.rank_zero")
    logging.getLogger(f"{package}.utilities.rank_zero").propagate = True
    strategy = ASGDStrategy(find_unused_parameters=True)
    trainer = importlib.import_module(package).Trainer
    trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    said = [record.getMessage() for record in caplog.records if "DDP" in record.getMessage()]
    assert said == ["find_unused_parameters: an argument of DDP's that is not needed here."]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_strategy_shows_what_differs_from_the_defaults(package: str) -> None:
    made = ASGDStrategy(5, start_method="fork", advanced=Advanced(gain=False), timeouts=Timeouts(silence_s=30))
    text = "ASGDStrategy(nsync=5, start_method='fork', timeouts=Timeouts(silence_s=30), advanced=Advanced(gain=False))"
    assert repr(made) == text
    assert repr(ASGDStrategy()) == "ASGDStrategy()"
    assert repr(FabricASGDStrategy(seed=1)) == "FabricASGDStrategy(seed=1)"
    module = importlib.import_module(package)
    trainer = module.Trainer(accelerator="cpu", devices=2, strategy=made, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, importlib.import_module(f"{package}.strategies").DDPStrategy)
    for one in (trainer.strategy, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert repr(one) == text
        assert one.options.advanced == Advanced(gain=False)
    island = ASGDStrategy(island=2)
    module.Trainer(accelerator="cpu", devices=2, strategy=island, logger=False, enable_checkpointing=False)
    assert repr(island) == "ASGDStrategy(island=2)"


def test_the_settings_that_are_logged_are_flat() -> None:
    settings = ASGDStrategy(5, algorithm="local_sgd", advanced=Advanced(npush=2, gain=False, units=len)).settings
    assert list(settings.items()) == [
        *(("nsync", 5), ("algorithm", "LocalSGD(transforms=(Barrier(),))"), ("compression", None)),
        *(("data", "leases"), ("num_servers", 1), ("start_method", "popen"), ("on_worker_failure", "continue")),
        *(("transport", "auto"), ("nfetch", 5), ("npush", 2), ("overlap", False), ("units", "len")),
        *(("min_workers", 1), ("server_machines", 1), ("max_offline_steps", 1000), ("snapshot_every_s", 60.0)),
        *(("offload", False), ("gain", False)),
    ]


@pytest.mark.parametrize("name", ["sparknet", "sparknet_cifar10", "speedo", "speedo_sync", "speedo_easgd"])
def test_recipes_are_arguments_of_a_strategy(name: str) -> None:
    assert not ASGDStrategy(**recipe(name)).options.config.overlap  # of SparkNet's local SGD by itself


STRATEGY = ("--trainer.strategy", "lightning_asgd.ASGDStrategy")
FIELDS = "--trainer.strategy.init_args.advanced"


def command_line(package: str, *given: str) -> Any:
    """The strategy of a ``LightningCLI`` with some arguments."""
    pytest.importorskip("jsonargparse")
    cli = importlib.import_module(f"{package}.cli").LightningCLI
    model = importlib.import_module(f"{package}.demos.boring_classes").BoringModel
    quiet = ("--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false")
    with mock.patch.object(sys, "argv", ["program.py", *quiet, *STRATEGY, *given]):
        return cli(model, run=False, save_config_callback=None).trainer.strategy


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    "given",
    [
        (f"{FIELDS}.gain", "false", f"{FIELDS}.npush", "3"),
        (FIELDS, "{gain: false, npush: 3}"),
        (FIELDS, "{class_path: lightning_asgd.Advanced, init_args: {gain: false, npush: 3}}"),
    ],
)
def test_advanced_settings_on_the_command_line_of_lightning(package: str, given: tuple[str, ...]) -> None:
    assert command_line(package, *given).options.advanced == Advanced(gain=False, npush=3)


@pytest.mark.parametrize("package", PACKAGES)
def test_arguments_of_lightnings_strategies_in_a_configuration(package: str) -> None:
    plugin = f"{package}.plugins.io.TorchCheckpointIO"
    made = command_line(package, "--trainer.strategy.init_args.checkpoint_io", f"{{class_path: {plugin}}}")
    assert type(made.checkpoint_io).__name__ == "TorchCheckpointIO"


def test_the_command_line_of_lightning_shows_fields_and_choices() -> None:
    pages = []
    for page in ((), ("--trainer.strategy.advanced.help",)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as caught:
            command_line("lightning.pytorch", "--trainer.strategy.help", STRATEGY[1], *page)
        assert caught.value.code == 0
        pages.append(out.getvalue())
    assert "{popen,spawn,fork,forkserver}" in pages[0]
    assert "{leases,split}" in pages[0]
    assert not [name for name in Advanced.__dataclass_fields__ if f".{name}" not in pages[1]]
