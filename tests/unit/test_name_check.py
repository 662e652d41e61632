"""What is said of a release of Lightning that lacks what this package uses, of either package."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning import class_trees
from lightning_asgd.core.lightning.name_check import check_trainer, check_tree
from tests.helpers.programs import environment

PACKAGES = {tree.package: tree for tree in class_trees.TREES}
LOADED = {"pytorch_lightning": pytorch_lightning, "lightning.pytorch": lightning.pytorch}


@pytest.fixture(params=PACKAGES)
def tree(request: pytest.FixtureRequest) -> Any:
    return PACKAGES[request.param]


@pytest.fixture
def pl(tree: Any) -> Any:
    return LOADED[tree.package]


def no_warning(message: str) -> None:
    pytest.fail(f"warned: {message}")


def trainer_of(pl: Any, **options: Any) -> Any:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1, **options)


def boring_classes(pl: Any) -> Any:
    return importlib.import_module(f"{pl.__name__}.demos.boring_classes")


def refusal(check: Callable[[], None]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check()
    return str(caught.value)


def test_the_present_release_has_everything(tree: Any, pl: Any) -> None:
    check_tree(tree, no_warning)
    check_trainer(tree, trainer_of(pl), no_warning, leases=True)


def test_a_class_that_a_module_lacks(tree: Any, pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "__version__", "2.7.0")
    monkeypatch.delattr(pl.strategies.launchers, "_SubprocessScriptLauncher")
    said = refusal(lambda: check_tree(tree, no_warning))
    missing = "`strategies.launchers._SubprocessScriptLauncher` (present 2.5.0 to 2.6.6; needed to start workers)"
    assert said.startswith(f"{tree.package} 2.7.0 lacks {missing}, ")
    assert said.endswith(f". Install {tree.distribution}>=2.5.0,<2.7.")


def test_a_module_that_is_gone(tree: Any, pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{pl.__name__}.loops.fetchers", None)
    said = refusal(lambda: check_tree(tree, no_warning))
    assert "lacks `loops.fetchers._PrefetchDataFetcher` (present 2.5.0 to 2.6.6; needed to lease training data)" in said
    assert said.endswith(" or pass data='split'.")


def test_an_attribute_that_a_class_lacks(tree: Any, pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pl.utilities.combined_loader.CombinedLoader, "flattened")
    monkeypatch.setattr(
        pl.utilities.combined_loader.CombinedLoader,
        "__init__",
        lambda self, _: vars(self).update(_iterator=0, _mode=""),
    )
    said = refusal(lambda: check_tree(tree, no_warning))
    assert "lacks `CombinedLoader.flattened` (present 2.5.0 to 2.6.6; needed to find the training data)." in said


def test_an_attribute_that_a_new_object_lacks(tree: Any, pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutLength(pl.loops.fetchers._PrefetchDataFetcher):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            del self.length

    monkeypatch.setattr(pl.loops.fetchers, "_PrefetchDataFetcher", WithoutLength)
    said = refusal(lambda: check_tree(tree, no_warning))
    assert "lacks `WithoutLength.length` (present" in said


def test_a_signature_that_has_changed(tree: Any, pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = pl.strategies.launchers._MultiProcessingLauncher
    monkeypatch.setattr(launcher, "_wrapping_function", lambda self, trainer, process_idx: None)
    said = refusal(lambda: check_tree(tree, no_warning))
    assert "`_MultiProcessingLauncher._wrapping_function(process_idx, trainer)` (present" in said


def test_all_that_a_trainer_lacks_is_said_at_once(tree: Any, pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl, "__version__", "2.7.0")
    trainer = trainer_of(pl)
    trainer.val_check_batch = trainer._val_check_time_interval = None  # as they are since 2.6.0
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # since 2.5.2
    del trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop._batches_that_stepped
    trainer.fit_loop.epoch_loop.batch_progress = None
    said = refusal(lambda: check_trainer(tree, trainer, no_warning, leases=True))
    assert said == (
        f"{tree.package} 2.7.0 lacks "
        "`_FitLoop._data_fetcher` (present 2.5.0 to 2.6.6; needed to lease training data), "
        "`NoneType.current` (present 2.5.0 to 2.6.6; needed to count steps as all workers do), "
        "`NoneType.total` (present 2.5.0 to 2.6.6; needed to count steps as all workers do), "
        "`NoneType.is_last_batch` (present 2.5.0 to 2.6.6; needed to lease training data), "
        "`_TrainingEpochLoop._batches_that_stepped` (present 2.5.0 to 2.6.6; needed to count steps as all workers do). "
        f"Install {tree.distribution}>=2.5.0,<2.7."
    )


def test_what_leases_need_is_not_missed_where_the_data_are_split(tree: Any, pl: Any) -> None:
    trainer = trainer_of(pl)
    del trainer.fit_loop._data_fetcher
    said = refusal(lambda: check_trainer(tree, trainer, no_warning, leases=True))
    assert said.endswith(f". Install {tree.distribution}>=2.5.0,<2.7 or pass data='split'.")
    check_trainer(tree, trainer, no_warning, leases=False)


def test_what_can_be_missed_is_warned_of(tree: Any, pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = pl.callbacks.TQDMProgressBar
    make = bar.__init__

    def make_without(self: Any) -> None:
        make(self)
        del self._train_progress_bar

    monkeypatch.setattr(pl, "__version__", "2.7.0")
    monkeypatch.setattr(bar, "__init__", make_without)
    said: list[str] = []
    check_tree(tree, said.append)
    assert said == [
        f"{tree.package} 2.7.0 lacks `TQDMProgressBar._train_progress_bar` (present 2.5.0 to 2.6.6; needed to show how "
        "many batches are expected): the progress bar shows the number of batches that Lightning counts."
    ]


def test_a_warning_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(class_trees, "rank_zero_warn", said.append)
    for _ in range(2):
        class_trees._warn_once("a name is missing")
    assert said == ["a name is missing"]


def test_a_name_is_not_missed_in_releases_before_it_was_there(
    tree: Any, pl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pl, "__version__", "2.5.0")
    trainer = trainer_of(pl)
    vars(trainer).pop("_val_check_time_interval", None)
    check_trainer(tree, trainer, no_warning, leases=True)


def test_a_trainer_that_lacks_something_starts_nothing(pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_asgd.core.job.training_job import TrainingJob

    monkeypatch.setattr(TrainingJob, "begin", lambda *_, **__: pytest.fail("a job has begun"))
    trainer = trainer_of(pl, strategy=ASGDStrategy(), devices=2)
    del trainer.fit_loop.epoch_loop._skip_next_val
    said = refusal(lambda: trainer.fit(boring_classes(pl).BoringModel()))
    assert "lacks `_TrainingEpochLoop._skip_next_val` (present" in said


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    """What the first Trainer of each package says in a process of its own, if the package lacks something."""
    code = """
import json, lightning.pytorch, pytorch_lightning
from lightning_asgd import ASGDStrategy
said = {}
for pl in (lightning.pytorch, pytorch_lightning):
    del pl.trainer.call._call_callbacks_state_dict
    try:
        pl.Trainer(strategy=ASGDStrategy(), accelerator="cpu", devices=2, logger=False)
    except ValueError as error:
        said[pl.__name__] = str(error)
print(json.dumps(said))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=180, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_release_that_lacks_something_is_refused_by_its_first_trainer(pl: Any, refusals: dict[str, str]) -> None:
    assert (
        "lacks `trainer.call._call_callbacks_state_dict` (present 2.5.0 to 2.6.6; needed to save"
        in refusals[pl.__name__]
    )


def test_both_packages_have_the_same_signatures() -> None:
    for name in (name for name in class_trees.private_names.NAMES if name.module and len(name.parts) == 1):
        ours, theirs = (name.imported(tree) for tree in class_trees.TREES)
        assert inspect.isclass(ours) == inspect.isclass(theirs), name
        if name.kind == class_trees.private_names.SIGNATURE:
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
