"""A-SGD beside other strategies in one script, and beside programs that its workers start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_asgd import ASGDStrategy
from lightning_asgd.core.foundation.errors import ConfigurationError
from tests.helpers.ports import free_port
from tests.helpers.programs import environment
from tests.lightning.models import Regression, loader, trainer

# {pl} is the package whose Trainer is made; every rank writes what it has seen to a file of its own.
FIT = """
import json, sys
from pathlib import Path
import torch
import {pl} as pl
from lightning_asgd import ASGDStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_epoch_end(self):
        rank = torch.tensor(float(self.global_rank))
        total = float(self.trainer.strategy.reduce(rank, reduce_op="sum"))
        weight = float(self.net.weight.double().sum())
        self.seen = [self.trainer.world_size, self.global_rank, total, weight]

def fit(name, strategy, devices=2, callbacks=(), **more):
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, callbacks=list(callbacks), **(off | more)
    )
    trainer.fit(Keeping(name), DataLoader(TensorDataset(torch.randn(32, 4)), 4))
    return trainer

class Keeping(Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def on_train_end(self):
        Path(f"{{self.name}}-{{self.global_rank}}.json").write_text(json.dumps(self.seen))
"""


def run(folder: Path, script: str, pl: str = "pytorch_lightning", seconds: float = 100) -> str:
    """Run a script to its end.

    Returns:
        what it has printed.
    """
    (folder / "script.py").write_text(FIT.format(pl=pl) + script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def check(folder: Path, *names: str) -> None:
    """Both ranks of each fit have met, and hold the same weights."""
    for name in names:
        zero, one = (json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
        assert zero[:3] == [2, 0, 1.0], name
        assert one[:3] == [2, 1, 1.0], name
        assert zero[3] == one[3], name


@pytest.mark.parametrize(
    ("pl", "order"),
    [
        ("pytorch_lightning", ["ddp", "asgd", "asgd", "ddp"]),
        pytest.param("lightning.pytorch", ["asgd", "ddp", "asgd"], marks=pytest.mark.slow),
    ],
)
def test_ddp_and_asgd_follow_each_other_in_one_script(tmp_path: Path, pl: str, order: list[str]) -> None:
    script = f"""
for number, strategy in enumerate({order}):
    fit(f"{{number}}", "ddp" if strategy == "ddp" else ASGDStrategy(nsync=2, data="split"))
"""
    run(tmp_path, script, pl)
    check(tmp_path, *map(str, range(len(order))))


def test_ddp_and_asgd_follow_each_other_with_forked_workers(tmp_path: Path) -> None:
    script = """
fit("0", "ddp_fork")
fit("1", ASGDStrategy(nsync=2, start_method="fork"))
fit("2", "ddp_fork")
fit("3", ASGDStrategy(nsync=2, start_method="fork"))
"""
    run(tmp_path, script)
    check(tmp_path, *map(str, range(4)))


PROGRAM = (
    FIT.format(pl="pytorch_lightning")
    + """
name, devices = sys.argv[1], int(sys.argv[2])
trainer = fit(name, ASGDStrategy(nsync=2) if devices > 1 else "auto", devices)
assert trainer.world_size == devices
"""
)


@pytest.mark.slow  # nine scripts, which import everything; tests/unit/test_rank_variables.py has the rules
def test_programs_that_a_worker_starts_train_on_their_own(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    script = """
import subprocess

def program(name, devices):
    subprocess.run([sys.executable, "program.py", name, str(devices)], check=True, timeout=120)

class Starts(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == 1:
            program("within", 2)

trainer = fit("outer", ASGDStrategy(nsync=2), callbacks=[Starts()])
if trainer.global_rank == 0:
    program("after", 2)
else:
    program("alone", 1)
"""
    run(tmp_path, script, seconds=160)
    check(tmp_path, "outer", "within", "after")
    assert json.loads((tmp_path / "alone-0.json").read_text())[:3] == [1, 0, 0.0]


ENDS = """
import atexit, time
from lightning_asgd.core.foundation.errors import ProtocolError
atexit.register(lambda: Path(f"end-{trainer.global_rank}").touch())

class Fails(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        # In its first batch: no other is sure to be left for it.
        if trainer.global_rank == 1 and batch_idx == 0 and "after" not in sys.argv:
            raise KeyError("during the fit") if "during" in sys.argv else ProtocolError("'refused the fit'")

trainer = fit("fit", ASGDStrategy(nsync=2), callbacks=[Fails()])
if trainer.global_rank == 1:
    raise KeyError("after the fit")
if "after" in sys.argv:  # rank 0 lives on, and learns of the other's end
    import psutil
    from lightning_asgd.core.job import supervisor
    trainer.strategy.barrier()
    servers = supervisor.current().server_pids
    def runs(process):
        try:
            return "script.py" in process.cmdline()
        except psutil.Error:  # it has just ended
            return False
    while any(runs(p) for p in psutil.Process().children() if p.pid not in servers):
        time.sleep(0.1)
    time.sleep(0.5)
"""


@pytest.mark.parametrize("when", ["during", "after", "refused"])
def test_a_script_fails_where_a_worker_failed_and_no_fit_went_on_without_it(tmp_path: Path, when: str) -> None:
    (tmp_path / "script.py").write_text(FIT.format(pl="pytorch_lightning") + ENDS)
    command = [sys.executable, "script.py", when]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert f"Error: '{when} the fit'" in done.stderr
    fails = when != "during"
    line = "Worker 1 ended with exit code 1. It was refused, or no fit continued without it"
    assert (line in done.stderr) == fails, done.stderr
    assert done.returncode == int(fails), done.stderr
    assert json.loads((tmp_path / "fit-0.json").read_text())[1] == 0
    assert (tmp_path / "end-0").exists()


SAVES = """
class Fails(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.global_rank == int(sys.argv[1]):
            raise KeyError("a name that this rank lacks")

saver = pl.callbacks.OnExceptionCheckpoint(".", "rescued")
try:
    fit("fit", ASGDStrategy(nsync=2), callbacks=[Fails(), saver], enable_checkpointing=True)
except Exception as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_that_fails_where_all_meet_saves_without_the_others(tmp_path: Path, rank: int) -> None:
    """With its own error: the others would wait elsewhere for it, or for something else."""
    (tmp_path / "script.py").write_text(FIT.format(pl="pytorch_lightning") + SAVES)
    command = [sys.executable, "script.py", str(rank)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert "KeyError" in done.stdout + done.stderr
    assert "CollectiveMismatchError" not in done.stdout + done.stderr
    if rank:  # the others go on
        assert (tmp_path / "fit-0.json").exists()
    else:
        assert torch.load(tmp_path / "rescued.ckpt", weights_only=False)["global_step"] > 0


# As in Ray: every process sees one device, and only the environment knows how many processes there are.
FOREIGN = """
import os
environments = __import__("{fabric}.plugins.environments", fromlist=["ClusterEnvironment"])

class Foreign(environments.ClusterEnvironment):
    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = int(sys.argv[2])

    @staticmethod
    def detect():
        return True

    def world_size(self):
        return 2

    def set_world_size(self, size):
        pass

    def global_rank(self):
        return int(sys.argv[1])

    def set_global_rank(self, rank):
        pass

    def local_rank(self):
        return 3 + int(sys.argv[1])

    def node_rank(self):
        return 0

strategy = ASGDStrategy(nsync=2, cluster_environment=Foreign(), timeouts=Timeouts(start_s=40))
trainer = fit("fit", strategy, devices=1)
assert str(trainer.strategy.root_device) == "cpu"
module = Keeping("x")
module.predict_step = lambda batch, batch_idx: batch[0]
data = DataLoader(TensorDataset(torch.arange(6.0).reshape(6, 1)), 1)
predicted = torch.cat(trainer.predict(module, data)).flatten().tolist()
assert predicted == [[0, 2, 4], [1, 3, 5]][trainer.global_rank], predicted
"""


@pytest.mark.parametrize(
    ("pl", "fabric"),
    [
        ("pytorch_lightning", "lightning_fabric"),
        pytest.param("lightning.pytorch", "lightning.fabric", marks=pytest.mark.slow),
    ],
)
def test_an_environment_of_others_brings_its_own_world(tmp_path: Path, pl: str, fabric: str) -> None:
    script = FIT.format(pl=pl).replace("import ASGDStrategy", "import ASGDStrategy, Timeouts")
    (tmp_path / "script.py").write_text(script + FOREIGN.replace("{fabric}", fabric))
    port = free_port()
    ranks = []
    for rank in (0, 1):
        with (tmp_path / f"output{rank}").open("w") as output:
            command = [sys.executable, "script.py", str(rank), str(port)]
            about = {"env": environment(), "stdout": output, "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen(command, cwd=tmp_path, **about))
    try:
        codes = [process.wait(100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], "\n".join((tmp_path / f"output{rank}").read_text()[-3000:] for rank in (0, 1))
    check(tmp_path, "fit")


def test_a_process_that_no_worker_is_left_for_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigurationError, match=r"This process has rank 1, but the Trainer has 1 worker"):
        trainer(tmp_path, ASGDStrategy(), devices=1).fit(Regression(), loader(64))
