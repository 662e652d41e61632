"""What a terminal shows of a fit of two workers, the second of them slowed down: messages and progress bars.

In its first batch of an epoch the second worker waits until the first one has trained most of it. A fit runs in a
pseudo terminal of 80 columns, and what it draws there is recorded. To see it:

    python -m tests.lightning.test_terminal rich lightning.pytorch    # or tqdm, and pytorch_lightning
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import multiprocessing
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_asgd import ASGDStrategy
from tests.helpers.holding import await_file
from tests.lightning import models
from tests.lightning.test_processes import alive, wait_until

SAMPLES, BATCH, EPOCHS, COLUMNS, DEADLINE_S = 400, 4, 2, 80, 60
MOST = 60  # of the 100 batches of an epoch
ESCAPE = r"\x1b\[[?\d;]*[A-Za-z]"
BARS = {"tqdm": "TQDMProgressBar", "rich": "RichProgressBar"}


class Frame(NamedTuple):
    """A bar as it was drawn once."""

    epoch: int
    batch: int
    total: int
    per_s: float


def frames(recorded: str) -> list[Frame]:
    text = re.sub(ESCAPE, "", recorded)
    drawn = re.findall(r"Epoch (\d+)[^\r\n]*? (\d+)/(\d+) [^\r\n]*?([\d.]+)it/s", text)
    return [Frame(int(epoch), int(batch), int(total), float(per_s)) for epoch, batch, total, per_s in drawn]


def fit(folder: Path, package: str, bar: str) -> None:
    pl = importlib.import_module(package)

    class Sleeps(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)
            self.batches = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches += 1
            time.sleep(0.05 if self.global_rank else 0.004)
            trained = folder / f"{bar}.{self.current_epoch}.trained"
            if self.global_rank == 0 and self.batches == MOST:
                trained.touch()
            elif self.global_rank == 1 and self.batches == 1:
                await_file(trained)
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.layer(batch[0])

        def on_train_epoch_end(self) -> None:
            (folder / f"{bar}{self.global_rank}.{self.current_epoch}").write_text(str(self.batches))
            self.batches = 0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        strategy=ASGDStrategy(nsync=4, start_method="fork"),
        callbacks=[getattr(pl.callbacks, BARS[bar])()],
        logger=pl.loggers.CSVLogger(folder, bar),
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(SAMPLES, 8))
    trainer.fit(Sleeps(), DataLoader(data, BATCH, shuffle=True), DataLoader(data, SAMPLES))


def in_terminal(folder: Path, package: str, bars: list[str], terminal: str) -> None:
    """The main process."""
    os.chdir(folder)
    file = os.open(terminal, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(file, number)
    os.environ |= {"TERM": "xterm", "COLUMNS": str(COLUMNS)}
    for bar in bars:
        fit(folder, package, bar)


def record(folder: Path, package: str, bars: list[str], process: Any) -> str:
    """Run it, and return all that it has written to its terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    main = process(target=in_terminal, args=(folder, package, bars, os.ttyname(theirs)))
    main.start()
    os.set_blocking(ours, False)
    written = bytearray()
    family: list[psutil.Process] = []

    def ended() -> bool:
        try:
            while part := os.read(ours, 1 << 16):
                written.extend(part)
        except BlockingIOError:
            pass
        with contextlib.suppress(psutil.NoSuchProcess):
            family[:] = psutil.Process(main.pid).children(recursive=True) or family
        return not main.is_alive()

    try:
        wait_until(ended, DEADLINE_S, "the end of the fits")
        ended()
        wait_until(lambda: not alive(family), 10, f"the end of {alive(family)}")
    finally:
        main.kill()
        main.join()
        os.close(ours)
        os.close(theirs)
    assert main.exitcode == 0, written.decode()
    return written.decode()


@pytest.mark.parametrize("package", ["pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.slow)])
def test_what_a_terminal_shows(tmp_path: Path, mains: Any, package: str) -> None:
    said = record(tmp_path, package, [*BARS], mains)
    assert said.count("Transport zmq is encrypted and authenticated") == 1
    assert len(re.findall(rf"[\r\n]({ESCAPE})*A-SGD: 2 workers", said)) == 2 * len(BARS), "they begin lines"
    assert not re.search(r"\x1b\[(1A|2K)", said.rpartition("A-SGD: ")[2]), "rich draws over none"
    for bar, text in zip(BARS, said.split("A-SGD: 2 workers, 1 server, ")[1:], strict=True):
        assert text.startswith(
            f"transport zmq (one machine).\r\n  nsync=4, data shared dynamically, logs in {bar}/version_0."
        )
        for epoch in range(EPOCHS):
            check(tmp_path, bar, [frame for frame in frames(text) if frame.epoch == epoch])
        assert text.count("A-SGD: 2 workers trained for ") == 1
        assert text.count(f"Report: lightning-asgd report {bar}/version_0") == 1


@pytest.mark.parametrize(("level", "devices", "lines"), [("INFO", 2, 2), ("INFO", 1, 3), ("ERROR", 2, 0)])
def test_lightnings_loggers_silence_it(
    level: str, devices: int, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("pytorch_lightning")
    monkeypatch.setattr(log, "handlers", [logging.FileHandler(tmp_path / "log")])
    before = log.level
    log.setLevel(level)
    try:
        fit = models.trainer(tmp_path, ASGDStrategy(start_method="fork"), max_epochs=1, devices=devices)
        fit.fit(models.Regression(), models.loader(64))
    finally:
        log.setLevel(before)
    said = (tmp_path / "log").read_text()
    assert said.count("A-SGD: ") == lines, "the chief alone says it"
    assert ("A-SGD: only one worker. To add workers: Trainer(devices=2)" in said) == (devices == 1)


def check(folder: Path, bar: str, drawn: list[Frame]) -> None:
    """The bar of an epoch is worker 0's, and its total, rate and end are true."""
    assert len(drawn) > 20
    assert [frame for frame in drawn if frame.batch > frame.total] == []
    assert [frame for frame in drawn if frame.batch > 1 and not frame.per_s] == [], "rich needs two batches"
    assert drawn == sorted(drawn, key=lambda frame: frame.batch), "one worker shows it"
    last = drawn[-1]
    trained = [int((folder / f"{bar}{rank}.{last.epoch}").read_text()) for rank in (0, 1)]
    assert sum(trained) == SAMPLES // BATCH
    assert trained[0] > trained[1]
    assert last.batch == last.total == trained[0]


def main(bar: str = "rich", package: str = "pytorch_lightning") -> None:
    """Record a bar, print what was recorded, and how the bar looked at the begin, in the middle and at the end."""
    with tempfile.TemporaryDirectory() as folder:
        said = record(Path(folder), package, [bar], multiprocessing.get_context("spawn").Process)
    sys.stdout.write(f"{said}\n")
    for epoch in range(EPOCHS):
        drawn = [frame for frame in frames(said) if frame.epoch == epoch and frame.batch > 1]
        for when, frame in zip(("begin", "middle", "end"), (drawn[0], drawn[len(drawn) // 2], drawn[-1]), strict=True):
            sys.stdout.write(f"epoch {epoch}, {when}: {frame.batch}/{frame.total}, {frame.per_s:.2f}it/s\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
