"""What the gain adds to a worker's step, with AdamW and models of 0.6 and 17 million parameters, on one thread.

    python benchmarks/gain_cost.py

A step is a forward and a backward pass over 32 samples and the optimizer's step. Blocks of ten steps with the gain, in
which the states are looked at once as with nsync=10, alternate with blocks without it. Exits with 1 if the median ratio
of neighbouring blocks is above 1.01.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time

import torch
from torch import nn

from lightning_asgd.gain import Gain

STEPS, BATCH, WORKERS, LIMIT = 10, 32, 4, 1.01
WIDTHS = {"0.6 M": (384, 3 * [448]), "17 M": (1024, 5 * [1920])}


def model(inputs: int, hidden: list[int]) -> nn.Module:
    widths = [inputs, *hidden, 10]
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def ratios(inputs: int, hidden: list[int], blocks: int) -> tuple[int, list[float], float]:
    """The number of parameters, times with the gain by times without it, and the milliseconds of a step without."""
    torch.manual_seed(0)
    net = model(inputs, hidden)
    batches = itertools.cycle([(torch.randn(BATCH, inputs), torch.randint(10, (BATCH,))) for _ in range(100)])
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def block() -> float:
        begun = time.perf_counter()
        for x, target in itertools.islice(batches, STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), target).backward()
            optimizer.step()
        return time.perf_counter() - begun

    block()
    pairs = []
    for number in range(blocks):
        took = {}
        for gains in (True, False) if number % 2 else (False, True):
            gain = Gain(lambda: WORKERS)
            if gains:
                gain.watch([optimizer])
            took[gains] = block()
            gain.close()
        pairs.append((took[True], took[False]))
    size = sum(parameter.numel() for parameter in net.parameters())
    return size, [a / b for a, b in pairs], 1000 * statistics.median(b for _, b in pairs) / STEPS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    for name, (inputs, hidden) in WIDTHS.items():
        size, found, step_ms = ratios(inputs, hidden, args.blocks)
        median = statistics.median(found)
        good &= median <= LIMIT
        print(
            f"{name}: {size:,} parameters, a step {step_ms:.1f} ms; with the gain {median:.4f} times as long "
            f"({min(found):.3f} to {max(found):.3f})"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
