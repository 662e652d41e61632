"""Ways to start: both Lightnings in any order, the command line, a notebook, spawned workers, SLURM's variables."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import textwrap
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_asgd import Advanced, ASGDStrategy
from lightning_asgd.core.foundation.environment import SECRET_ENV
from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning import launchers
from tests.helpers.programs import environment
from tests.lightning.models import Recorder, Regression, digest, loader, trainer
from tests.lightning.test_processes import check_finished, start

# What a program may do before it makes a Trainer; {pl} is the package whose Trainer it makes.
ORDERS = {
    "ours first": "from lightning_asgd import ASGDStrategy\nimport {pl} as pl\nstrategy = ASGDStrategy(nsync=5)",
    "ours last": "import {pl} as pl\nfrom lightning_asgd import ASGDStrategy\nstrategy = ASGDStrategy(nsync=5)",
    "made before the import": (
        "from lightning_asgd import ASGDStrategy\nstrategy = ASGDStrategy(nsync=5)\nimport {pl} as pl"
    ),
    "the other one first": (
        "import {other}\nimport lightning_asgd\nimport {pl} as pl\nstrategy = lightning_asgd.ASGDStrategy(nsync=5)"
    ),
    "by name": "import lightning_asgd\nimport {pl} as pl\nstrategy = 'asgd_fork'",
}
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""
CHECK = """
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
from lightning_asgd import ASGDStrategy
assert isinstance(trainer.strategy, ASGDStrategy), trainer.strategy
assert isinstance(trainer.strategy, pl.strategies.DDPStrategy), trainer.strategy
assert trainer.world_size == 2
modules = [cls.__module__ for cls in type(trainer.strategy.launcher).__mro__]
assert next(module for module in modules if not module.startswith("lightning_asgd.")).startswith("{pl}.")
"""


@pytest.mark.parametrize(
    ("pl", "other", "orders"),
    [
        ("pytorch_lightning", "lightning.pytorch", ("ours first", "the other one first")),
        pytest.param("pytorch_lightning", "lightning.pytorch", tuple(ORDERS), marks=pytest.mark.slow),
        pytest.param("lightning.pytorch", "pytorch_lightning", tuple(ORDERS), marks=pytest.mark.slow),
    ],
)
def test_either_lightning_takes_the_strategy_in_any_order_of_imports(
    pl: str, other: str, orders: tuple[str, ...]
) -> None:
    jobs = {}
    for order in orders:
        code = ORDERS[order]
        program = code.format(pl=pl, other=other) + CHECK.format(pl=pl)
        if order == "ours first":  # with only one of the two installed
            top = {"pytorch_lightning", "lightning_fabric"} if pl.startswith("lightning.") else {"lightning"}
            program = BLOCK.format(names=top) + program
        jobs[order] = program
    # one process per order would take 5 s each: fork, since nothing is imported before
    runner = textwrap.dedent("""
        import os, sys, traceback, torch, torchmetrics, lightning_utilities
        failed = []
        for order, program in eval(sys.stdin.read()).items():
            pid = os.fork()
            if pid == 0:
                try:
                    exec(program, {"__name__": "__main__"})
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            if os.waitpid(pid, 0)[1]:
                failed.append(order)
        print("failed:", failed)
    """)
    done = subprocess.run(
        [sys.executable, "-c", runner],
        input=repr(jobs),
        capture_output=True,
        text=True,
        timeout=200,
        env=environment(),
        check=False,
    )
    assert "failed: []" in done.stdout, done.stdout + done.stderr[-3000:]


def test_a_way_to_start_workers_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start_method='thread'\. Expected 'popen', 'spawn', 'fork' or 'forkserver'"):
        ASGDStrategy(start_method="thread")


class Tuned(ASGDStrategy):
    """A strategy of a user's own."""

    def __init__(self, word: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.word = word

    def on_train_start(self) -> None:
        super().on_train_start()
        self.word += f" on {self.global_rank}"


def test_a_users_subclass(tmp_path: Path) -> None:
    strategy = Tuned("hello", nsync=2, advanced=Advanced(overlap=False))
    trainer(tmp_path, strategy, devices=1, max_epochs=1).fit(Regression(), loader(64))
    assert strategy.word == "hello on 0"
    assert strategy.stats.pushes == 4


@pytest.mark.slow  # every process imports everything anew
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_spawned_workers(tmp_path: Path, start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SECRET_ENV, "LIGHTNING_ASGD_OWN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    if start_method == "forkserver":
        forkserver.ensure_running()  # whose environment has no secret
    module = Regression()
    run = trainer(
        tmp_path, ASGDStrategy(nsync=3, start_method=start_method), callbacks=[Recorder(tmp_path)], max_epochs=1
    )
    run.fit(module, loader(64))
    zero, one = Recorder.read(tmp_path, 0), Recorder.read(tmp_path, 1)
    assert zero[-1]["digest"] == one[-1]["digest"] == digest(module)
    assert run.strategy.stats.pushes == zero[-1]["stats"]["pushes"] > 0


CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  limit_train_batches: 6
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: lightning_asgd.ASGDStrategy
    init_args:
      nsync: 2
      algorithm:
        class_path: lightning_asgd.algorithms.ASGD
        init_args:
          scale: sum
          transforms: [{class_path: lightning_asgd.algorithms.DropStale, init_args: {limit: 1000}}]
      timeouts: {collective_s: 60}
      advanced: {nfetch: 3}
"""
CLI = """
from pathlib import Path
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Model(BoringModel):
    def on_fit_end(self):
        config = self.trainer.strategy.options.config
        # A file each: where Python does not buffer, the other rank's output may cut a printed line in two.
        Path(f"ended-{self.global_rank}").write_text(f"{config.npush} {config.nfetch} {config.timeouts.collective_s}")

if __name__ == "__main__":
    LightningCLI(Model, BoringDataModule, save_config_callback=None)
"""


def test_the_command_line_of_lightning(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(CLI)
    (tmp_path / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "program.py", "fit", "--config", "config.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = {path.name: path.read_text() for path in tmp_path.glob("ended-*")}
    assert seen == {"ended-0": "2 3 60.0", "ended-1": "2 3 60.0"}, done.stdout + done.stderr


CELLS = [
    """
import pytorch_lightning as pl, torch, lightning_asgd
from tests.lightning.models import Regression, dataset, loader
torch.manual_seed(0)
module = Regression(lr=0.01)  # at 0.05 one process's SGD ends above 1 in one run of ten, too
options = dict(accelerator="cpu", devices=2, max_epochs=60, logger=False, enable_checkpointing=False)
trainer = pl.Trainer(strategy="asgd_notebook", **options)
trainer.fit(module, loader())
print("loss", float(module.eval().loss(dataset().tensors)), "pushes", trainer.strategy.stats.pushes)
""",
    """
trainer = pl.Trainer(strategy="asgd_notebook", **{**options, "max_epochs": 2})  # the same cell once more
trainer.fit(module, loader())
print("again", trainer.strategy.stats.pushes)
""",
    """
try:
    pl.Trainer(strategy="asgd", **options)
except Exception as error:
    print("refused:", error)
""",
]


@pytest.mark.timeout(600)
def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = ["".join(o.get("text", "") for o in cell.outputs if o.get("name") == "stdout") for cell in book.cells]
    loss, pushes = re.search(r"loss ([\d.]+) pushes (\d+)", said[0]).groups()  # type: ignore[union-attr]
    assert float(loss) < 0.5
    assert int(pushes) >= 60  # one per epoch at the least: the other worker may be the faster one
    assert int(re.search(r"again (\d+)", said[1]).group(1)) >= 2  # type: ignore[union-attr]
    assert "not compatible with an interactive environment" in said[2]


@pytest.mark.slow
def test_the_variables_of_slurm(tmp_path: Path) -> None:
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
    }
    ranks = [start(tmp_path, **job, SLURM_PROCID=str(r), SLURM_LOCALID=str(r), NODE_RANK=str(r)) for r in range(2)]
    check_finished(tmp_path, ranks)


@pytest.mark.parametrize(
    ("argument", "spec", "error"),
    [
        ("train.py", None, ""),
        ("gone.py", None, "none at '.*/gone.py'"),
        ("-c", None, "none at '.*/-c'"),
        ("train.py", "__main__", "started as a folder or an archive"),
    ],
)
def test_a_script_that_cannot_be_run_again_is_refused(
    argument: str, spec: str | None, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [argument])
    main: Any = ModuleType("__main__")
    main.__spec__ = spec and SimpleNamespace(name=spec)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ConfigurationError, match=error) if error else contextlib.nullcontext():
        launchers._check_script()


def test_a_job_whose_script_is_not_found_does_not_train_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nfrom lightning_asgd import ASGDStrategy\nfrom tests.lightning.models import *\n"
        "os.chdir('elsewhere')\n"
        "trainer('.', ASGDStrategy(nsync=5), devices=2).fit(Regression(), loader())\n"
    )
    (tmp_path / "elsewhere").mkdir()
    said = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert said.returncode == 1
    assert "ConfigurationError: The Trainer runs the script again for each further worker" in said.stderr


def test_a_callback_that_only_worker_0_has(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import pytorch_lightning as pl\nfrom pytorch_lightning.utilities import rank_zero_only\n"
        "from lightning_asgd import ASGDStrategy\nfrom tests.lightning.models import *\n"
        "class Shows(pl.Callback):\n    def on_train_end(self, *_): print('shown')\n"
        "callbacks = [Shows()] if rank_zero_only.rank == 0 else []\n"
        "trainer('.', ASGDStrategy(nsync=5), devices=2, callbacks=callbacks).fit(Regression(), loader(), loader(16))\n"
    )
    said = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert (said.returncode, said.stdout.count("shown")) == (0, 1), said.stderr[-3000:]
