"""A DataLoader's process that is killed leaves no file behind: the sockets through which it passes tensors on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy
from tests.helpers.programs import environment
from tests.lightning.models import Regression

KILLED = "LOADERS"


class Killing(Regression):
    def on_train_batch_end(self, *args: object) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 2:
            for each in psutil.Process().children():
                each.kill()
            sys.stdout.write(KILLED)


@pytest.mark.parametrize("start", [{}, {"start_method": "fork"}], ids=["scripts", "fork"])
def test_a_killed_loader_leaves_no_socket_behind(tmp_path: Path, start: dict[str, str]) -> None:
    command = [sys.executable, "-m", __name__, *start.values()]
    env = environment(TMPDIR=str(tmp_path))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr  # worker 0 has trained on
    assert KILLED in done.stdout
    assert "DataLoader worker" in done.stderr
    assert "_remove_temp_dir" not in done.stderr  # a folder is removed once
    assert [str(path) for path in tmp_path.rglob("*") if not path.name.startswith("pytorch-errorfile")] == []


def main() -> None:
    strategy = ASGDStrategy(nsync=2, **dict(zip(["start_method"], sys.argv[1:], strict=False)))
    data = TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=4, **off)
    trainer.fit(Killing(), DataLoader(data, 8, num_workers=2))


if __name__ == "__main__":
    main()
