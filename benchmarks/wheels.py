"""The package as users install it: sdist and wheel are built, and each extra is tried in an empty environment.

    python benchmarks/wheels.py
    python benchmarks/wheels.py --only zmq wandb

The wheel is built from the sdist. For each extra, and for none, it is installed into a new virtual environment, with
the versions of constraints.txt. There, outside of the repository, it is imported, ``lightning-asgd --version`` is
called, two workers fit, and what the extra is for is used. Most of the time goes to installing torch, a minute each.

Exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import os
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
import pytorch_lightning as pl
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
    "docs": ("python", "-c", "import sphinx, myst_parser, furo"),
    "screenshots": ("python", "-c", "import playwright.sync_api, pyte"),
    "engines": ("python", "-c", "import kubeflow_trainer_api, kubernetes_validate"),
    "dev": ("python", "-c", "import hypothesis, lightning, mlflow, mypy, nbclient, pytest, tensorboard"),
}


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


def environment(folder: Path) -> Path:
    """A new virtual environment; returns the folder of its programs."""
    call(sys.executable, "-m", "venv", str(folder), cwd=folder.parent)
    return folder / "bin"


def install(programs: Path, *what: str) -> None:
    pip = str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"
    call(*pip, "-c", str(ROOT / "constraints.txt"), *what, cwd=programs)


def build(folder: Path) -> Path:
    """Build sdist and wheel, the wheel from the sdist. Returns the wheel."""
    programs = environment(folder / "builder")
    install(programs, "build")
    made = folder / "dist"
    call(str(programs / "python"), "-m", "build", "--outdir", str(made), str(ROOT), cwd=folder)
    (wheel,) = made.glob("*.whl")
    (sdist,) = made.glob("*.tar.gz")
    print(f"built {sdist.name} ({sdist.stat().st_size:,} bytes) and {wheel.name} ({wheel.stat().st_size:,} bytes)")
    return wheel


def try_out(wheel: Path, extra: str, folder: Path) -> None:
    """Install the wheel with an extra into an empty environment, and use it there."""
    programs = environment(folder / "environment")
    install(programs, f"{wheel}[{extra}]" if extra else str(wheel))
    work = folder / "work"
    work.mkdir()
    script = FIT.replace("LOGGER", WANDB if extra == "wandb" else CSV)
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
    parser.add_argument("--only", nargs="+", choices=[*EXTRAS], default=[*EXTRAS], help="extras; '' is none of them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wheels.") as name:
        wheel = build(Path(name))
        for number, extra in enumerate(arguments.only):
            begun, folder = time.monotonic(), Path(name) / str(number)
            folder.mkdir()
            try_out(wheel, extra, folder)
            print(f"PASS  {extra or 'without extras':16} {time.monotonic() - begun:5.0f} s", flush=True)


if __name__ == "__main__":
    main()
