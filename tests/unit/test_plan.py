from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

import lightning_asgd
from lightning_asgd.cli.command_line import main

PAGE = Path(lightning_asgd.__file__).parent.parent / "docs" / "sizing.md"
NUMBERS = ["--parameters", "1e6", "--step-s", "0.1", "--batch-size", "32", "--simulate", "5"]

SCRIPT = """
    import pytorch_lightning as pl
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
            self.norm = torch.nn.BatchNorm1d(8)

        def training_step(self, batch, batch_idx):
            loss = self.layer(self.norm(batch[0])).square().mean()
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=1)

        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)

    class ByHand(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    class Data(pl.LightningDataModule):
        def setup(self, stage):
            self.rows = TensorDataset(torch.randn(16, 8))

        def train_dataloader(self):
            return DataLoader(self.rows, batch_size=4)

    class OtherName(Net):
        train_dataloader = pl.LightningModule.train_dataloader

        def training_step(self, batch, i):
            return super().training_step(batch, i)

    def with_data():
        return OtherName(), Data()

    class Lossless(Net):
        def training_step(self, batch):
            return None
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.partition("picture:")[0].strip().splitlines()]


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    block = re.search(r"```\n\$ lightning-asgd (plan .*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    words = [str(tmp_path / word) if word.endswith(".png") else word for word in shlex.split(block[1])]
    assert main(words) == 0
    printed = iter(lines(capsys.readouterr().out))
    assert all(line in printed for line in lines(block[2]) if line != "...")  # in this order
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_more_workers_than_are_to_be_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--link-gbit-s", "1", "--workers", "6", *NUMBERS]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"efficiency, if nsync is kept +100.0%\n", re.sub(" +\n", "\n", printed))
    assert "6 workers, 1 server" in printed


def test_times_end_where_costs_were_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--link-gbit-s", "1", "--workers", "3000", *NUMBERS]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"times +not calibrated beyond 1,024 workers", printed)
    assert "Times: not calibrated beyond 1,024 workers. --measure measures this machine." in printed
    assert "memory of a server" in printed
    rows = {row.split()[0]: row.split()[1:] for row in printed.splitlines() if re.match(" +[0-9,]+ ", row)}
    assert len(rows["1,000"]) == 6, "the last table has all columns"
    for workers in ("2,000", "3,000", "10,000"):  # memory alone
        assert re.fullmatch(r"[\d.]+ [GM]B", " ".join(rows[workers])), rows[workers]


def test_the_coordinator_limits_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["--parameters", "1e3", "--step-s", "0.01", "--batch-size", "1", "--nsync", "100", "--simulate", "0"]
    assert main(["plan", "--link-gbit-s", "100", "--workers", "1000", *fast]) == 0
    printed = capsys.readouterr().out
    share = re.search(r"coordinator's ([\d.]+)%", printed)
    speed = re.search(r"efficiency, if nsync is kept +([\d.]+)%", printed)
    assert share is not None
    assert speed is not None
    assert float(share[1]) == 100.0
    assert 40 < float(speed[1]) < 95  # a worker trains for 1 s, and requests leases twice


@pytest.mark.slow  # it starts a server, and measures for seconds
def test_a_machine_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measure", "--link-gbit-s", "1", *NUMBERS]) == 0
    printed = capsys.readouterr().out
    assert "Milliseconds of a server's core, this machine" in printed
    assert "--measure measures" not in printed
    figures = re.findall(r"^ +(16|64|256|1,024) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) *$", printed, re.MULTILINE)
    assert len(figures) == 4
    assert all(0 < float(figure) < 20 for row in figures for figure in row[1:])


def test_a_module_is_measured(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    sizes = ["--batch-sizes", "[4,64]"]
    assert main(["plan", "--module", f"{script}:Net", "--link-gbit-s", "1", "--simulate", "0", *sizes]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\b64 .*recommended", printed), "64 samples take hardly longer than 4"
    nbytes = 4 * (8 + 1 + 8 + 8 + 8 + 8)  # with the running mean and variance
    assert f"{nbytes} B" in printed


def test_a_module_is_measured_with_a_datamodule(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    words = ["plan", "--link-gbit-s", "1", "--simulate", "0", "--module"]
    assert main([*words, f"{script}:with_data"]) == 0
    assert capsys.readouterr().out.lstrip().startswith("Batch size, measured")
    assert main([*words, f"{script}:OtherName"]) == 1
    assert "made a OtherName without train_dataloader(). Expected a LightningModule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ([], "No change is needed: exchanges of 2 workers are hidden behind 10 steps."),
        (["--workers", "10", "--parameters", "25.6e6"], "10 workers keep one server's core 100 % busy: use "),
        (["--workers", "3000"], "Times for 3,000 workers are not known: "),
        (["--worker-link-gbit-s", "0.001"], "Exchanges of 2 workers may take longer than 10 steps: use nsync="),
        (["--workers", "1000", "--nsync", "10000", "--step-s", "0.01"], "1,000 workers keep the coordinator's core "),
    ],
)
def test_the_first_line_says_what_to_do(capsys: pytest.CaptureFixture[str], words: list[str], verdict: str) -> None:
    assert main(["plan", "--link-gbit-s", "10", *NUMBERS, "--simulate", "0", *words]) == 0
    assert capsys.readouterr().out.startswith(verdict)


def test_a_modules_own_batch_is_measured(capsys: pytest.CaptureFixture[str], script: Path) -> None:
    assert main(["plan", "--module", f"{script}:Net", "--link-gbit-s", "1", "--simulate", "0"]) == 0
    assert "recommended" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--step-s", "0.1"],
            r"--parameters, --batch-size not given. Expected --parameters, --step-s and --batch-size, or",
        ),
        ([*NUMBERS, "--workers", "0"], r"--workers 0. Expected a whole number of at least 1"),
        (["--module", "nothing"], r"'nothing' has no name. Expected 'package.module:Name'"),
        (["--module", "no_such_module:Net"], r"There is no module 'no_such_module'"),
        (["--module", "no_such_file.py:Net"], r"There is no file 'no_such_file.py'"),
        (["--module", "{script}:Missing"], r"has no 'Missing'. Expected a name that is defined there"),
        (["--module", "{script}:ByHand"], r"ByHand has 1 optimizers and automatic_optimization=False. Expected one"),
        (["--module", "{script}:Lossless"], r"training_step of Lossless returned None. Expected a loss"),
        (
            ["--module", "pathlib:Path"],
            r"pathlib:Path made a .* without train_dataloader\(\). Expected a LightningModule",
        ),
    ],
)
def test_what_is_wrong_is_said(
    capsys: pytest.CaptureFixture[str], script: Path, words: list[str], message: str
) -> None:
    assert main(["plan", "--link-gbit-s", "1", *(word.format(script=script) for word in words)]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_it_knows_what_devices_of_islands_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *NUMBERS, "--link-gbit-s", "1", "--island", "8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "an island of 8 devices" in printed
    assert "1 M 2 MB 1 MB 1 MB 1 MB 1.5 MB" in printed
    assert "70 B 140 GB 70 GB 67.1 MB 70 GB 105 GB" in printed
