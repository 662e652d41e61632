from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_asgd.caches.cache import CachedDataset
from lightning_asgd.cli.command_line import main
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.foundation.stats import ExchangeStats
from lightning_asgd.data_stalls.probe import stalls
from lightning_asgd.data_stalls.stalls import Stalls

BATCH = 2
FETCH_S, PREP_S, TRAIN_S = 0.008, 0.005, 0.010  # of a sample, of a sample, of a step


class Clock:
    """Virtual time: it passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


CLOCK = Clock()


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Net(pl.LightningModule):
    def __init__(self, sleep: Callable[[float], None] = CLOCK.sleep, seconds: float = TRAIN_S) -> None:
        super().__init__()
        self.sleep, self.seconds = sleep, seconds
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any) -> torch.Tensor:
        self.sleep(self.seconds)
        return (self.weight * batch.float().mean()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Storage(Dataset[Any]):
    """Samples that take their time every time."""

    def __init__(
        self, samples: int = 200, seconds: float = FETCH_S, sleep: Callable[[float], None] = CLOCK.sleep
    ) -> None:
        self.samples, self.seconds, self.sleep = samples, seconds, sleep

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.sleep(self.seconds)
        return index


class SlowAtFirst(Storage):
    """Samples that take their time when they are first read, and are prepared every time."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()

    def __getitem__(self, index: int) -> int:
        if index not in self.known:
            super().__getitem__(index)
            self.known.add(index)
        return prepare(index)


class Preparation:
    """Takes its time for every sample."""

    def __init__(self, seconds: float = PREP_S, sleep: Callable[[float], None] = CLOCK.sleep) -> None:
        self.seconds, self.sleep = seconds, sleep

    def __call__(self, sample: int) -> int:
        self.sleep(self.seconds)
        return sample


prepare = Preparation()


def measure(dataset: Any, **settings: Any) -> Stalls:
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH)
    return stalls(Net(), loader, **{"steps": 12, "warm_up": 2, "clock": CLOCK} | settings)


@pytest.mark.parametrize("fetch_s", [0.0, FETCH_S])
@pytest.mark.parametrize("prep_s", [0.0, PREP_S])
def test_each_delay_is_attributed_to_its_cause(fetch_s: float, prep_s: float) -> None:
    found = measure(CachedDataset(Storage(seconds=fetch_s), 10**6, Preparation(prep_s)))
    assert found.fetch_stall_s == pytest.approx(BATCH * fetch_s)
    assert found.prep_stall_s == pytest.approx(BATCH * prep_s)
    assert found.synthetic_s == pytest.approx(TRAIN_S)
    assert found.load_s == pytest.approx(BATCH * (fetch_s + prep_s))
    assert found.prep_s == pytest.approx(BATCH * prep_s)
    assert found.predicted_step_s() == pytest.approx(found.cold_s)
    assert found.predicted_step_s(cached=1.0) == pytest.approx(found.cached_s)


def test_a_small_cache_of_the_datasets_own_makes_no_difference() -> None:
    small = measure(CachedDataset(Storage(), 1, prepare))
    large = measure(Subset(CachedDataset(Storage(), 10**6, prepare), range(99)))
    assert small.fetch_stall_s == pytest.approx(large.fetch_stall_s) == pytest.approx(BATCH * FETCH_S)
    assert small.cached_s == pytest.approx(large.cached_s)


def test_what_the_second_reading_saves_is_fetching_elsewhere() -> None:
    found = measure(SlowAtFirst(), steps=20)
    assert found.fetch_stall_s == pytest.approx(BATCH * FETCH_S)
    assert found.prep_stall_s == pytest.approx(BATCH * PREP_S)


@pytest.mark.slow
def test_real_delays_are_attributed_within_a_tenth() -> None:
    """Storage that sleeps and a busy loop that prepares. Other programs may disturb some of the attempts."""
    dataset = CachedDataset(Storage(sleep=time.sleep), 10**6, Preparation(sleep=busy))
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH)
    attempts = []
    for _ in range(4):
        found = stalls(Net(time.sleep), loader, steps=6, warm_up=1, repeats=6)
        attempts.append((found.fetch_stall_s / (BATCH * FETCH_S), found.prep_stall_s / (BATCH * PREP_S)))
        if all(0.9 <= share <= 1.1 for share in attempts[-1]):
            return
    pytest.fail(f"fetch and prep stalls, of what was injected: {attempts}")


def test_the_loaders_own_processes_are_used() -> None:
    dataset = CachedDataset(Storage(seconds=0.0), 10**6, Preparation(0.001, time.sleep))
    loader: DataLoader[Any] = DataLoader(Subset(dataset, range(60)), batch_size=BATCH, num_workers=2)
    found = stalls(Net(), loader, steps=10)
    assert found.processes == 2
    assert found.prep_s >= BATCH * 0.001 / 2 / 2, "of the two, at most one can be ahead by what was timed"


@pytest.mark.slow
def test_processes_hide_what_the_device_takes_longer_for() -> None:
    """Two processes prepare a batch in 120 ms / 2, which 90 ms of training hide; with fetching it is 300 ms / 2."""
    dataset = CachedDataset(Storage(seconds=0.09, sleep=time.sleep), 10**6, Preparation(0.06, time.sleep))
    loader: DataLoader[Any] = DataLoader(Subset(dataset, range(150)), batch_size=BATCH, num_workers=2)
    found = stalls(Net(time.sleep, 0.09), loader, steps=10)
    assert found.prep_stall_s < 0.02
    assert found.fetch_stall_s == pytest.approx(0.06, abs=0.02)
    assert found.prep_rate == pytest.approx(BATCH / 0.06, rel=0.2)


def test_the_sync_stall_comes_from_a_fits_statistics() -> None:
    stats = ExchangeStats(steps=100, wait_s=0.5)
    found = measure(Storage(), exchanges=stats)
    assert found.sync_s == 0.005
    assert found.step_s == found.cold_s + 0.005


def test_the_datasets_own_cache_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    dataset = CachedDataset(Storage(seconds=0.0), 10**6)
    cache = dataset.cache
    measure(dataset, files=tmp_path)
    assert dataset.cache is cache
    assert cache is not None
    assert len(cache) == 0


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream()), "DataLoader over Stream. Expected a DataLoader that makes batches of a map-style"),
        (DataLoader(Storage(), batch_size=None), "DataLoader over Storage. Expected a DataLoader that makes batches"),
        (DataLoader(Storage(samples=3)), "gives 3 batches. Expected at least 10, 5 of them to warm up"),
    ],
)
def test_other_loaders_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        stalls(Net(), loader)


def test_a_loader_without_batches_is_refused() -> None:
    """It has samples, but not enough for a batch."""
    empty: DataLoader[Any] = DataLoader(Storage(samples=1), batch_size=2, drop_last=True)
    with pytest.raises(ConfigurationError, match=r"gives 0 batches. Expected at least 1, 0 of them to warm up"):
        stalls(Net(), empty, warm_up=0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "program.py"
    text = """
        import time
        from torch.utils.data import DataLoader
        from lightning_asgd.caches.cache import CachedDataset
        from tests.unit.test_probe import Net, Storage

        def make():
            return Net(), DataLoader(CachedDataset(Storage(sleep=time.sleep), 1000), batch_size=2)
    """
    script.write_text(textwrap.dedent(text))
    words = ["stalls", "--module", f"{script}:make", "--steps", "5", "--warm-up", "2", "--repeats", "1"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for name in ("training", "prep stall", "fetch stall", "the whole step", "storage gives", "storage twice as fast"):
        assert re.search(rf"{name} .*\d", printed), name
