"""A newcomer's walk: follow the documentation as a new user would, from its pages alone.

    sudo python -m benchmarks.newcomer
    sudo python -m benchmarks.newcomer --venv             # in a new virtual environment, installed as the pages say
    sudo python -m benchmarks.newcomer --only encrypted   # steps with this word in their names

The steps: one machine, your own module, two machines, workers that join and leave (unencrypted, and encrypted with a
secret), and an offline run of Weights & Biases. Commands are those of the pages, word for word; the programs are the
first page's `train.py`, changed by the arguments that each page gives its Trainer. The two machines are network
namespaces, joined by a cable of 100 Mbit/s. If a page is wrong, the walk fails.

Exits with 1 if a step fails, or if all of them take more than 10 minutes, which a newcomer should need at most.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.network import Network, available, two_machines
from tests.helpers import pages

LIMIT_S = 600.0
COMMAND_S = 300.0  # in which a command must be through; all together have LIMIT_S
MBIT = 100.0
POLL_S = 0.2
ADDRESSES = ("10.0.0.1", "10.0.0.2")  # the pages' own: nobody but the two namespaces sees them
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 120)

ONE_MACHINE = pages.DOCS / "tutorials" / "one_machine.md"
TWO_MACHINES = pages.DOCS / "tutorials" / "several_machines.md"
RUNS = pages.DOCS / "elastic.md"
MONITORING = pages.DOCS / "monitoring.md"

# Somebody's own program, written for DDP. The page says what to change in it.
OWN = """
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 32))

    def step(self, batch, name):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log(name, loss, on_epoch=True, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val_loss")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    torch.manual_seed(0)
    x = torch.randn(2048, 4) @ torch.randn(4, 32)
    train, val = (TensorDataset(part) for part in x.split([1792, 256]))
    best = ModelCheckpoint("checkpoints", monitor="val_loss")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=8,
        strategy="ddp",
        callbacks=[best, EarlyStopping("val_loss", patience=5)],
        enable_progress_bar=False,
    )
    trainer.fit(Autoencoder(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=32))
    if trainer.is_global_zero:
        found = Autoencoder.load_from_checkpoint(best.best_model_path).eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(found.decoder(found.encoder(x)), x)
        print(f"loss {loss / x.var():.3f}")


if __name__ == "__main__":
    main()
"""
OWN_LOSS = 0.5  # of the data's variance: it has learnt something


class WrongError(Exception):
    """Something is not as a page says."""


# ---------------------------------------------------------------------- pages


def block(page: Path, language: str, *words: str) -> str:
    """The one block of a page that holds these words."""
    found = [each.text for each in pages.blocks(page, language) if all(word in each.text for word in words)]
    if len(found) != 1:
        raise WrongError(f"{pages.name_of(page)} has {len(found)} blocks of {language} with {words}, not one.")
    return found[0]


def changed(program: str, code: str) -> str:
    """A program whose Trainer has the arguments that a page's block gives to its own, and what they need.

    Args:
        program: with one call of Trainer.
        code: with one call of Trainer, and assignments to names that stand in its arguments.
    """
    tree, given = ast.parse(program), ast.parse(code)
    values = {node.targets[0].id: node.value for node in given.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    theirs, ours = _call_of_trainer(given).keywords, _call_of_trainer(tree)
    for keyword in theirs:
        if isinstance(keyword.value, ast.Name):
            keyword.value = values[keyword.value.id]
    new = {keyword.arg for keyword in theirs}
    ours.keywords = [*(keyword for keyword in ours.keywords if keyword.arg not in new), *theirs]
    tree.body[:0] = [node for node in given.body if isinstance(node, ast.ImportFrom)]
    return ast.unparse(tree)


def _call_of_trainer(tree: ast.AST) -> ast.Call:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Trainer"]
    return call


# ---------------------------------------------------------------------- machines


@dataclass(frozen=True)
class Machine:
    """Somewhere to run commands, in a folder of its own.

    Attributes:
        folder: where they run.
        environment: their variables.
        prefix: what to put before a command.
    """

    folder: Path
    environment: dict[str, str]
    prefix: tuple[str, ...] = ()

    def start(self, script: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a page's commands, and write what they say to a file."""
        self.folder.mkdir(exist_ok=True)
        with log.open("w") as output:
            return subprocess.Popen(
                [*self.prefix, "bash", "-ec", script],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, script: str, seconds: float = COMMAND_S) -> str:
        """What a page's commands say.

        Raises:
            WrongError: they fail, or take too long.
        """
        with tempfile.NamedTemporaryFile() as file:
            log = Path(file.name)
            with ended(self.start(script, log)) as process:
                return finished(process, script, log, seconds)


def finished(process: subprocess.Popen[bytes], what: str, log: Path, seconds: float = COMMAND_S) -> str:
    """What a process has said when it has ended well."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise WrongError(f"`{what.strip()}` took more than {seconds:g} s:\n{log.read_text()[-2000:]}") from None
    if code != 0:
        raise WrongError(f"`{what.strip()}` ended with {code}:\n{log.read_text()[-2000:]}")
    return log.read_text()


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill at the end what is still there of processes, and all that they have started."""
    try:
        yield processes[0]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(condition: Callable[[], bool], what: str, *logs: Path) -> None:
    """Wait for something.

    Raises:
        WrongError: it does not happen.
    """
    deadline = time.monotonic() + COMMAND_S
    while not condition():
        if time.monotonic() > deadline:
            said = "\n".join(log.read_text()[-1500:] for log in logs)
            raise WrongError(f"{what} did not happen within {COMMAND_S:g} s:\n{said}")
        time.sleep(POLL_S)


# ---------------------------------------------------------------------- the walk


class Walk:
    """The steps. Each returns what came of it, in a few words.

    Args:
        folder: for all that it writes.
        network: the two machines.
        environment: of all commands.
    """

    def __init__(self, folder: Path, network: Network, environment: dict[str, str]) -> None:
        self.folder = folder
        self.network = network
        self.environment = environment
        self.program = block(ONE_MACHINE, "python", "class Digits")
        (text,) = re.findall(r"The accuracy is above ([\d.]+)\.", ONE_MACHINE.read_text())
        self.accuracy = float(text)

    def machine(self, step: str, index: int | None = None, **variables: str) -> Machine:
        """A machine of the network, or this one, with a folder for a step."""
        prefix = () if index is None else tuple(self.network.prefix(index))
        if index is not None:  # a machine would have cores of its own: threads that fight for them hardly get on
            variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 2))
        return Machine(self.folder / f"{step}-{index}", {**self.environment, **variables}, prefix)

    def write(self, machine: Machine, program: str) -> None:
        machine.folder.mkdir(parents=True, exist_ok=True)
        (machine.folder / "train.py").write_text(program)

    def reached(self, output: str) -> str:
        """The accuracy that a program prints, which must be as high as the page says."""
        found = re.findall(r"^accuracy ([\d.]+)$", output, re.MULTILINE)
        if len(found) != 1 or float(found[0]) <= self.accuracy:
            raise WrongError(f"Expected one accuracy above {self.accuracy:g}, found {found}:\n{output[-2000:]}")
        return f"accuracy {found[0]}"

    def one_machine(self) -> str:
        machine = self.machine("one")
        self.write(machine, self.program)
        output = machine.run(block(ONE_MACHINE, "bash", "python train.py"))
        missing = [key for key in keys(ONE_MACHINE) if f"'{key}'" not in output]
        if missing:
            raise WrongError(f"The summary has no {missing}:\n{output[-2000:]}")
        return self.reached(output)

    def own_module(self) -> str:
        (new, old) = re.findall(r"`(strategy=[^`]+)` in place of `(strategy=[^`]+)`", ONE_MACHINE.read_text())[0]
        machine = self.machine("own")
        program = f"from lightning_asgd import ASGDStrategy\n{OWN.replace(old, new)}"
        self.write(machine, program)
        output = machine.run("python train.py")
        loss = float(re.findall(r"^loss ([\d.]+)$", output, re.MULTILINE)[0])
        if loss > OWN_LOSS:
            raise WrongError(f"Expected a loss below {OWN_LOSS} of the variance, not {loss}.")
        return f"loss {loss:.3f} of the variance, from its best checkpoint"

    def two_machines(self) -> str:
        machines = [self.machine("two", node) for node in (0, 1)]
        program = changed(self.program, block(TWO_MACHINES, "python", "num_nodes=2"))
        logs, processes = [], []
        for node, machine in enumerate(machines):
            self.write(machine, program)
            logs.append(machine.folder / "output")
            processes.append(machine.start(block(TWO_MACHINES, "bash", f"NODE_RANK={node}"), logs[-1]))
        with ended(*processes):
            said = [finished(*each) for each in zip(processes, ("machine 0", "machine 1"), logs, strict=True)]
        return self.reached(said[0])

    def runs(self, *, encrypted: bool) -> str:
        """Servers and a worker here, a worker there; the first worker is killed, the other one ends the run."""
        serve, code = block(RUNS, "bash", "/my-model\n"), block(RUNS, "python", "import ASGDStrategy")
        secret = {"LIGHTNING_ASGD_SECRET": self.secret()} if encrypted else {}
        here, there = (self.machine("zmq" if encrypted else "rpc", node, **secret) for node in (0, 1))
        for machine in (here, there):
            self.write(machine, changed(self.program, code))
        train, status = block(RUNS, "bash", "python train.py"), block(RUNS, "bash", "lightning-asgd status")
        logs = [here.folder / "serve", here.folder / "output", there.folder / "output"]
        servers = here.start(serve, logs[0])
        with ended(servers):
            until(lambda: "Workers attach" in logs[0].read_text(), "the servers' start", logs[0])
            first, second = here.start(train, logs[1]), there.start(train, logs[2])
            with ended(first, second):
                until(lambda: both_came(logs[1:]), "the joining of both workers", *logs)
                os.killpg(first.pid, signal.SIGKILL)
                seen = there.run(status)
                accuracy = self.reached(finished(second, "the second worker", logs[2]))
            after = there.run(status)
            os.killpg(servers.pid, signal.SIGINT)
            finished(servers, "lightning-asgd serve", logs[0])
        transport = "zmq" if encrypted else "rpc"
        if f"Transport {transport} (" not in logs[0].read_text():
            raise WrongError(f"Expected transport {transport}:\n{logs[0].read_text()}")
        if "run my-model" not in seen or not re.search(r"Worker \d+ has left\.", after):
            raise WrongError(f"The status was\n{seen}\nand then\n{after}")
        return f"{accuracy} on the second machine, the first one's worker killed"

    def secret(self) -> str:
        """One as the page makes it."""
        _, *commands = block(RUNS, "bash", "openssl").splitlines()  # the first one installs
        return self.machine("secret").run("\n".join([*commands, "echo $LIGHTNING_ASGD_SECRET"])).strip()

    def weights_and_biases(self) -> str:
        machine = self.machine("wandb")
        self.write(machine, changed(self.program, block(MONITORING, "python", "offline=True")))
        self.reached(machine.run("python train.py"))
        shown = machine.run(block(MONITORING, "bash", "wandb leet"))
        # Not with every module: tokens, served tables, outer momentum, and the gain of Adam's steps.
        elsewhere = {"tokens_per_s", "tables/hits", "tables/age", "outer_gain", "gain"}
        names = [f"asgd/{name}" for name in keys(MONITORING) if name not in elsewhere]
        names += [f"asgd/worker{worker}/{name}" for worker in (0, 1) for name in ("samples_per_s", "wait/share")]
        missing = [name for name in names if name not in shown]
        if missing:
            raise WrongError(f"The run has no {missing}:\n{shown}")
        report = block(MONITORING, "bash", "lightning-asgd report").splitlines()[-1]
        page = Path(machine.run(report).rpartition("Report: ")[2].strip())
        if "worker 1" not in page.read_text():
            raise WrongError(f"{page} does not show worker 1.")
        return f"{len(names)} figures and a report, without a network"

    def steps(self) -> dict[str, Callable[[], str]]:
        """All, by name."""
        return {
            "one machine": self.one_machine,
            "your own module": self.own_module,
            "two machines": self.two_machines,
            "workers that join and leave": lambda: self.runs(encrypted=False),
            "the same, encrypted": lambda: self.runs(encrypted=True),
            "Weights & Biases, offline": self.weights_and_biases,
        }


def keys(page: Path) -> list[str]:
    """The names that the first column of a page's tables explains: a row may hold several."""
    rows = re.findall(r"^\| (`[a-z_/]+`(?:, `[a-z_/]+`)*) \|", page.read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def both_came(logs: list[Path]) -> bool:
    """Whether a worker has heard that the other one has joined."""
    return any(re.search(r"Worker \d+ \(.*\) has joined", log.read_text()) for log in logs)


# ---------------------------------------------------------------------- the environment


def fresh(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Make a virtual environment, and install into it what the pages say, from a copy of this checkout.

    Returns:
        the variables with which it is active.
    """
    checkout = folder / "checkout"
    left_out = shutil.ignore_patterns(".git", ".venv", "build", "results", "*.egg-info", "__pycache__")
    shutil.copytree(pages.ROOT, checkout, ignore=left_out)
    venv = folder / "venv"
    active = {**environment, "VIRTUAL_ENV": str(venv), "PATH": f"{venv}/bin:{environment['PATH']}"}
    active.pop("PYTHONPATH", None)
    machine = Machine(checkout, active)
    machine.run(f"'{sys.executable}' -m venv '{venv}'")
    for page in (ONE_MACHINE, RUNS, MONITORING):
        for each in pages.blocks(page, "bash"):
            commands = [line for line in each.text.splitlines() if line.startswith("pip install")]
            if commands:
                machine.run("\n".join(commands), LIMIT_S)
    return active


def walk(*, venv: bool, only: str) -> bool:
    """Do the steps, and print what came of them; whether all went well, in time."""
    table = Table(title="A newcomer's walk", title_justify="left")
    for heading in ("", "seconds", ""):
        table.add_column(heading, justify="right" if heading else "left")
    began, good = time.monotonic(), True

    def step(name: str, do: Callable[[], str]) -> None:
        nonlocal good
        CONSOLE.print(f"{name} ...")
        start = time.monotonic()
        try:
            outcome = escape(do())
        except WrongError as error:
            good = False
            CONSOLE.print(f"[red]{escape(str(error))}[/]")
            outcome = "[red]FAIL[/]: see above"
        table.add_row(name, f"{time.monotonic() - start:.1f}", outcome)

    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    with tempfile.TemporaryDirectory() as name, two_machines(MBIT, addresses=ADDRESSES) as network:
        folder = Path(name)
        if venv:

            def install() -> str:
                environment.update(fresh(folder, environment))
                environment.pop("PYTHONPATH", None)
                return "a fresh environment"

            step("install", install)
        for title, do in Walk(folder, network, environment).steps().items():
            if only in title:
                step(title, do)
    seconds = time.monotonic() - began
    in_time = seconds <= LIMIT_S
    table.add_section()
    table.add_row("in all", f"{seconds:.1f}", f"{'[green]PASS[/]' if in_time else '[red]FAIL[/]'}: {LIMIT_S:g} s")
    CONSOLE.print(table)
    return good and in_time


def _end(*_: object) -> None:
    """As after Ctrl-C, so that nothing is left behind, also where the signal comes twice, as from `timeout`."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--venv", action="store_true", help="install into a fresh environment first")
    parser.add_argument("--only", default="", help="a word in the names of the steps to do")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    reason = available()
    if reason is not None:
        CONSOLE.print(f"[red]{escape(reason)}[/]")
        return 1
    return 0 if walk(venv=args.venv, only=args.only) else 1


if __name__ == "__main__":
    sys.exit(main())
