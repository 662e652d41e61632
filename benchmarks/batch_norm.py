"""Batch norm's running statistics after an epoch, beside DDP: 200 runs of two networks in real processes.

    python -m benchmarks.batch_norm                       # about a quarter of an hour
    python -m benchmarks.batch_norm --runs 5 --only "2 workers"

Each run trains 60 steps per worker, and compares the statistics with those that ``torch.optim.swa_utils.update_bn``
computes again over the training data with the final weights: the validation loss with the ones and the others, and the
distance between them. Where the inputs' scale jumps by 100 in the middle of the epoch, data from after it are used.

The last figures of a line are those of running statistics that nothing disturbs: as many workers' layers see 60 batches
each with the final weights, and their statistics are averaged. Training cannot be expected to come closer.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.buffers import Ranks
from tests.conformance.lab import Lab
from tests.conformance.pair import ASGD, DDP

STEPS, BATCH = 60, 16
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Setting:
    """How a network is trained: the last rank sleeps ``slow_s`` in every step."""

    workers: int
    options: dict[str, Any] = field(default_factory=dict)
    slow_s: float = 0.0
    jump: float = 1.0


SETTINGS = {
    "4 workers, nsync=10": Setting(4, {"nsync": 10}),
    "2 workers, nsync=20": Setting(2, {"nsync": 20}),
    "4 workers, one ten times slower": Setting(4, {"nsync": 10}, slow_s=0.02),
    "4 workers, the scale jumps by 100": Setting(4, {"nsync": 10}, jump=100.0),
}


def dense() -> nn.Module:
    """Two layers of 32 with batch norm."""
    layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 2))


def convolutional() -> nn.Module:
    """Two convolutions with batch norm, on images of 8 x 8."""
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(16, 2))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (8,)),
    "convolutional": (convolutional, (1, 8, 8)),
}


@dataclass(frozen=True)
class Run:
    """One fit, with what it finds on every rank."""

    network: str
    setting: Setting
    seed: int

    def __call__(self, lab: Lab) -> dict[str, Any]:
        make, shape = NETWORKS[self.network]
        setting, generator = self.setting, torch.Generator().manual_seed(self.seed)
        count = STEPS * BATCH * setting.workers
        x = 0.5 * torch.randn(count + 1024, *shape, generator=generator)
        y = (x.flatten(1)[:, :8].sum(1) > 0).long()
        x[count // 2 :] *= setting.jump
        torch.manual_seed(self.seed)
        lowest = [1.0]

        class Overrides:
            def build(self: Any) -> None:
                self.net = make()

            def loss(self: Any, batch: Any) -> Tensor:
                return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

            def on_train_batch_start(self: Any, *_: Any) -> None:
                if lab.rank == setting.workers - 1:
                    time.sleep(setting.slow_s)

            def on_train_batch_end(self: Any, *_: Any) -> None:
                lowest.append(lowest_variance(self.net))

            def configure_optimizers(self: Any) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.05)

        module = lab.regression(Overrides)
        torch.manual_seed(self.seed)
        module.net = make()
        data, jumps = TensorDataset(x[:count], y[:count]), setting.jump != 1.0
        in_turn = DistributedSampler(data, setting.workers, lab.rank, shuffle=False)
        train = DataLoader(data, BATCH, shuffle=not jumps, sampler=in_turn if jumps else None)
        held_out = DataLoader(TensorDataset(x[count:], y[count:]), 256)
        lab.trainer(max_epochs=1, use_distributed_sampler=not jumps).fit(module, train, held_out)
        lowest.append(lowest_variance(module.net))
        recomputed, seen = copy.deepcopy(module.net), x[count // 2 : count]
        update_bn(DataLoader(TensorDataset(seen), 256), recomputed)
        reference, still = loss(recomputed, held_out), undisturbed(module.net, seen, setting.workers)
        return {
            "lowest": min(lowest),
            "loss": loss(module.net, held_out) / reference,
            "distance": distance(module.net, recomputed),
            "undisturbed": (loss(still, held_out) / reference, distance(still, recomputed)),
        }


def layers(net: nn.Module) -> list[Any]:
    """The batch norms of a network."""
    return [each for each in net.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]


def lowest_variance(net: nn.Module) -> float:
    """The lowest running variance; NaN if there is one."""
    return float(torch.cat([layer.running_var for layer in layers(net)]).min())


def loss(net: nn.Module, data: DataLoader[Any]) -> float:
    """The loss in evaluation."""
    net.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(net(x), y, reduction="sum") for x, y in data]
    return float(sum(losses)) / len(data.dataset)  # type: ignore[arg-type]


def undisturbed(net: nn.Module, data: Tensor, workers: int) -> nn.Module:
    """The network with the mean statistics of ``workers`` whose weights do not change while they see batches."""
    copies = [copy.deepcopy(net).train() for _ in range(workers)]
    with torch.no_grad():
        for each, _ in itertools.product(copies, range(STEPS)):
            each(data[torch.randint(len(data), (BATCH,))])
        for name, buffer in copies[0].named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.stack([each.get_buffer(name) for each in copies]).mean(0))
    return copies[0]


def distance(one: nn.Module, other: nn.Module) -> float:
    """The mean distance of running means and variances, as parts of the recomputed deviation and variance."""
    parts = []
    for a, b in zip(layers(one), layers(other), strict=True):
        parts += [(a.running_mean - b.running_mean).abs() / b.running_var.sqrt().clamp(min=1e-6)]
        parts += [(a.running_var - b.running_var).abs() / b.running_var.clamp(min=1e-6)]
    return float(torch.cat(parts).mean())


def spread(values: Sequence[float]) -> str:
    """The mean, the minimum and the maximum."""
    return f"{statistics.fmean(values):.4f} ({min(values):.4f}-{max(values):.4f})"


def main() -> None:
    """Run all, and print what was found; the exit code is 1 if a line is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25, help="of each network and setting")
    parser.add_argument("--only", default="", help="settings whose names contain this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder, missed, total = Path(tempfile.mkdtemp()), 0, 0
    everything: dict[str, list[dict[str, Any]]] = {ASGD: [], DDP: []}
    for (name, setting), network in itertools.product(SETTINGS.items(), NETWORKS):
        if given.only not in name:
            continue
        found: dict[str, list[dict[str, Any]]] = {}
        for strategy in (ASGD, DDP):
            facts = found[strategy] = []
            with contextlib.closing(Ranks("pytorch_lightning", strategy, setting.workers, **setting.options)) as ranks:
                for seed in range(given.runs):
                    where = folder / f"{total}"
                    where.mkdir()
                    total += 1
                    outcomes = ranks.run(Run(network, setting, seed), where, DEADLINE_S)
                    if errors := [outcome.trace for outcome in outcomes if outcome.error]:
                        raise RuntimeError(errors[0])
                    lowest = min((each.facts["lowest"] for each in outcomes), key=lambda each: (each == each, each))
                    facts.append({**outcomes[0].facts, "lowest": lowest})
        ours, theirs = found[ASGD], found[DDP]
        for strategy, facts in found.items():
            everything[strategy] += facts
        bad = sum(not each["lowest"] >= 0 or not each["loss"] < float("inf") for each in ours)
        ratios, references = (sorted(each["loss"] for each in facts) for facts in (ours, theirs))
        mine, other = (statistics.fmean(each["distance"] for each in facts) for facts in (ours, theirs))
        least, nearest = zip(*(each["undisturbed"] for each in ours), strict=True)
        passes = not bad and ratios[0] >= 0.98 and ratios[-1] <= 1.02 and mine <= other
        missed += not passes
        print(
            f"{name:36} {network:14} {len(ours)} runs, {bad} with a negative variance or NaN; loss / recomputed "
            f"{spread(ratios)}, DDP {spread(references)}, undisturbed {spread(least)}; distance {mine:.4f}, DDP "
            f"{other:.4f}, undisturbed {statistics.fmean(nearest):.4f}: {'PASS' if passes else 'MISSED'}",
            flush=True,
        )
    shutil.rmtree(folder)
    for strategy, facts in everything.items():
        distances, ratios = ([each[name] for each in facts] for name in ("distance", "loss"))
        print(f"{len(facts)} runs, {strategy}: loss / recomputed {spread(ratios)}, distance {spread(distances)}")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
