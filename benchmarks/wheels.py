"""The package as users install it: sdist and wheel are checked, and each extra is tried in an empty environment.

    python benchmarks/wheels.py
    python benchmarks/wheels.py --only zmq wandb
    python benchmarks/wheels.py --pythons python3.10 python3.13
    python benchmarks/wheels.py --build dist               # for a release: sdist and wheel, checked

The wheel that the sdist builds must have the bytes of the wheel that the tree builds. So the sdist is complete, and a
release that is built again is the same file. Both must pass twine's check, and the wheel check-wheel-contents.

For each extra, for none, with ``lightning`` beside ``pytorch-lightning``, and for each of ``--pythons``, the wheel is
installed into a new virtual environment, with the versions of constraints.txt. There, outside of the repository, it is
imported, ``lightning-asgd --version`` is called, two workers fit, and what the extra is for is used. Most of the time
goes to installing torch, a minute each.

Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600.0  # for a command

FIT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import LIGHTNING as pl
from lightning_asgd import ASGDMonitor, ASGDStrategy


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    LOGGER
    trainer = pl.Trainer(
        strategy=ASGDStrategy(nsync=4, transport="TRANSPORT"), accelerator="cpu", devices=2, max_epochs=3,
        logger=logger, callbacks=[ASGDMonitor()], enable_progress_bar=False, log_every_n_steps=1,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(512, 4)), 8))
    assert trainer.strategy.stats.pushes > 0
    if trainer.is_global_zero:
        print("trained")
"""
CSV = 'logger = pl.loggers.CSVLogger(".")'
WANDB = 'logger = pl.loggers.WandbLogger(project="wheel", offline=True, save_dir=".")'

# Each extra, with a command that shows what it is for.
EXTRAS: dict[str, tuple[str, ...]] = {
    "": ("lightning-asgd", "plan", "--help"),
    "cli": ("lightning-asgd", "plan", "--parameters=25e6", "--step-s=0.1", "--batch-size=32", "--link-gbit-s=10"),
    "report": ("lightning-asgd", "report", "."),
    "zmq": ("python", "-c", "import zmq"),
    "ray": ("python", "-c", "import lightning_asgd.ray, ray.train"),
    "wandb": ("python", "-c", "import pathlib; assert list(pathlib.Path('wandb').glob('offline-run-*'))"),
    "examples": ("python", "-c", "import sklearn, torchvision, jsonargparse"),
}
LIGHTNING = "lightning"  # the other package's Trainer
CHECKERS = ("build", "twine", "check-wheel-contents")
NOT_OF_THE_TREE = (".*", "__pycache__", "*.egg-info", "build", "dist", "results")


def call(*command: str, cwd: Path, **variables: str) -> str:
    """Run a command outside of the repository. Returns its output."""
    hidden = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def environment(folder: Path, python: str = sys.executable) -> Path:
    """A new virtual environment; returns the folder of its programs."""
    call(python, "-m", "venv", str(folder), cwd=folder.parent)
    return folder / "bin"


def install(programs: Path, *what: str) -> None:
    pip = str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"
    call(*pip, "-c", str(ROOT / "constraints.txt"), *what, cwd=programs)


def build(folder: Path) -> Path:
    """Build sdist and wheel, the wheel from the sdist, and check both. Returns the wheel."""
    programs = environment(folder / "builder")
    install(programs, *CHECKERS)
    tree, made, again = folder / "tree", folder / "dist", folder / "again"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_OF_THE_TREE))
    when = call("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    command = str(programs / "python"), "-m", "build", str(tree), "--outdir"
    call(*command, str(made), cwd=folder, SOURCE_DATE_EPOCH=when)
    call(*command, str(again), "--wheel", cwd=folder, SOURCE_DATE_EPOCH=when)
    (wheel,), (sdist,), (direct,) = made.glob("*.whl"), made.glob("*.tar.gz"), again.glob("*.whl")
    print(f"built {sdist.name} ({sdist.stat().st_size:,} bytes) and {wheel.name} ({wheel.stat().st_size:,} bytes)")
    assert wheel.read_bytes() == direct.read_bytes(), "the sdist builds another wheel than the tree"
    call(str(programs / "twine"), "check", "--strict", str(sdist), str(wheel), cwd=folder)
    call(str(programs / "check-wheel-contents"), str(wheel), cwd=folder)
    print("PASS  the sdist builds the bytes that the tree builds; twine and check-wheel-contents", flush=True)
    return wheel


def try_out(wheel: Path, case: str, folder: Path) -> None:
    """Install the wheel with an extra, or as another case says, into an empty environment, and use it there."""
    extra = case if case in EXTRAS else ""
    programs = environment(folder / "environment", sys.executable if case in (*EXTRAS, LIGHTNING) else case)
    install(programs, f"{wheel}[{extra}]" if extra else str(wheel), *([LIGHTNING] if case == LIGHTNING else []))
    work = folder / "work"
    work.mkdir()
    script = FIT.replace("LOGGER", WANDB if extra == "wandb" else CSV)
    script = script.replace("LIGHTNING", "lightning.pytorch" if case == LIGHTNING else "pytorch_lightning")
    (work / "fit.py").write_text(script.replace("TRANSPORT", "zmq" if extra == "zmq" else "auto"))
    where = call(str(programs / "python"), "-c", "import lightning_asgd; print(lightning_asgd.__file__)", cwd=work)
    assert str(folder) in where, f"imported from {where}"
    assert "lightning-asgd" in call(str(programs / "lightning-asgd"), "--version", cwd=work)
    output = call(str(programs / "python"), "fit.py", cwd=work)
    assert output.splitlines().count("trained") == 1, output
    program, *arguments = EXTRAS[extra]
    call(str(programs / program), *arguments, cwd=work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [*EXTRAS, LIGHTNING]
    parser.add_argument("--only", nargs="+", choices=cases, default=cases, help="'' is without extras")
    parser.add_argument("--pythons", nargs="+", default=[], help="other Pythons, without extras")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="only build and check, and copy both files there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheels.") as name:
        wheel = build(Path(name))
        if arguments.build:
            shutil.copytree(wheel.parent, arguments.build, dirs_exist_ok=True)
            return
        for case in (*arguments.only, *arguments.pythons):
            begun = time.monotonic()
            with tempfile.TemporaryDirectory(dir=name) as folder:  # torch takes some GB each time
                try_out(wheel, case, Path(folder))
            print(f"PASS  {Path(case).name or 'without extras':16} {time.monotonic() - begun:5.0f} s", flush=True)


if __name__ == "__main__":
    main()
