"""The core stands without the features: an importer refuses their folders, and two workers train all the same."""

from __future__ import annotations

import subprocess
import sys

from tests.house import CORE, ROWS, SLICE, in_core
from tests.test_slices import DEBTS

PROGRAM = """
import importlib, sys
refused, modules = (each.split() for each in sys.argv[1:])

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"lightning_asgd.{each}.") for each in refused):
            raise ImportError(f"{name} is refused")

sys.meta_path.insert(0, Refuses())
for module in modules:
    importlib.import_module(f"lightning_asgd.{module}")

import torch
from tests.helpers.cluster import Cluster
from lightning_asgd.core.worker.synchronizer import run

cluster, wanted = Cluster(servers=2, workers=2), torch.arange(5.0)
weights = [torch.zeros(5, requires_grad=True) for _ in range(2)]
workers = [cluster.enter(rank, {"w": each}, nsync=2) for rank, each in enumerate(weights)]
for _ in range(60):
    for worker, each in zip(workers, weights):
        run(worker.advance())
        (gradient,) = torch.autograd.grad(((each - wanted) ** 2).sum(), each)
        with torch.no_grad():
            each -= 0.05 * gradient
        worker.count_step()
for worker in workers:
    run(worker.fetch())
assert all(torch.allclose(each, wanted, atol=0.1) for each in weights), weights
"""


def needed(slices: set[str]) -> set[str]:
    """Slices with all that their rows name, and so on."""
    while more := {each for name in slices for each in ROWS[name][0]} - slices:
        slices = slices | more
    return slices


def test_two_workers_train_while_every_feature_is_refused() -> None:
    core = {name for name in ROWS if name.partition("/")[0] == CORE}
    debts = needed({SLICE[line.split(" -> ")[1]] for line in DEBTS.read_text().splitlines()})
    refused = [name.replace("/", ".") for name in ROWS.keys() - core - debts]
    command = [sys.executable, "-c", PROGRAM, " ".join(refused), " ".join(filter(in_core, SLICE))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
