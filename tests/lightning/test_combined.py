"""Several training dataloaders follow speed: what they yield together is shared by the workers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, Subset

from lightning_asgd.algorithms import ASGD
from lightning_asgd.core.algorithms.config import Timeouts
from tests.lightning.models import loader, trainer
from tests.lightning.test_data import BATCH, SAMPLES, Numbered, Seen, Watching, strategy
from tests.lightning.test_streams import Counting

FIRST = 32  # samples of the first loader
MODES = {
    "min_size": Counter(range(FIRST)),  # and as many of the second
    "max_size": Counter(range(SAMPLES)),
    "max_size_cycle": Counter([*range(FIRST)] * 3 + [*range(FIRST, SAMPLES)]),
}


def parts(**options: Any) -> dict[str, DataLoader[Any]]:
    data, more = Numbered(), {"batch_size": BATCH, "shuffle": True, **options}
    ranges = {"few": range(FIRST), "many": range(FIRST, SAMPLES)}
    return {name: DataLoader(Subset(data, each), **more) for name, each in ranges.items()}


def joined(batch: Any) -> list[torch.Tensor]:
    """One batch of what the loaders yield together."""
    made = [part for part in batch.values() if part is not None]
    return [torch.cat(each) for each in zip(*made, strict=True)]


class Watching2(Watching):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(joined(batch), batch_idx)


@pytest.mark.parametrize(
    ("mode", "options"),
    [*((mode, {}) for mode in MODES), ("max_size_cycle", {"num_workers": 1, "persistent_workers": True})],
)
def test_every_batch_once_per_epoch_and_more_for_the_faster_worker(
    tmp_path: Path, mode: str, options: dict[str, Any]
) -> None:
    run = trainer(tmp_path, strategy(), max_epochs=2, val_check_interval=0.5)
    if mode == "min_size":
        options = {"batch_size": 2, **options}  # the few samples are eight batches of a sync interval
    module = Watching2(tmp_path, slow_s=0.3, ahead=3)
    run.fit(module, CombinedLoader(parts(**options), mode), loader(16))
    seen = Seen(tmp_path)
    for epoch in (0, 1):
        found = seen.of_epoch(epoch)
        if mode == "min_size":
            assert found.total() == 2 * FIRST
            assert set(found.values()) == {1}
            found = Counter({n: count for n, count in found.items() if n < FIRST})
        assert found == MODES[mode]
    assert seen.batches(0) > 1.5 * seen.batches(1)
    assert len({tuple(step for step, _, _ in rank["validated"]) for rank in seen.by_rank}) == 1
    assert len(seen.by_rank[0]["validated"]) == 4


class Counting2(Counting):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(joined(batch), batch_idx)


def test_a_killed_workers_batches_are_trained_by_others(tmp_path: Path) -> None:
    module = Counting2()
    options = {"algorithm": ASGD("sum"), "timeouts": Timeouts(silence_s=2)}
    trainer(tmp_path, strategy(**options), devices=3, max_epochs=2).fit(module, CombinedLoader(parts(), "max_size"))
    assert module.seen.tolist() == [2.0] * SAMPLES
