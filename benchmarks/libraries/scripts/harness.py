"""The common part of the programs in this folder: options, and records of what was trained.

Each of them is a script that the runner starts as a user would. ``run = Run(...)`` reads the command line,
``run.trainer_options()`` is handed to the library's Trainer, ``run.finish(...)`` ends the script. In between every
process writes to files of its own, named by its number, in the run's folder ``seen``:

* ``trained-<pid>``: the samples it trained, a line per batch;
* ``wrote-<pid>``: the files it opened for writing below the folder ``work``, where the script runs;
* ``finished-<pid>``: what it handed to :meth:`Run.finish`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # one thread per worker

import torch

warnings.filterwarnings("ignore")

__all__ = ["DataRun", "Run", "rows"]

NSYNC = 10
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def rows(tensor: Any) -> list[int]:
    """A number for each row of a batch, which is the same whenever the row is."""
    return [zlib.crc32(row.tobytes()) for row in torch.as_tensor(tensor).detach().cpu().contiguous().numpy()]


class Run:
    """One training of a program.

    Args:
        pl: the Lightning that the library uses: ``pytorch_lightning`` or ``lightning.pytorch``.
        samples: names the samples of a batch, each by something hashable.
        library: the package whose version is reported.
    """

    def __init__(self, pl: Any, samples: Callable[[Any], Iterable[Any]], library: str) -> None:
        args = _arguments()
        self.way: str = args.way
        self.workers: int = args.workers
        self.samples: int = args.samples
        self.processes: int = args.processes
        self.seed: int = args.seed
        self.data: Path = args.data  # of all trainings of this program
        self._seen: Path = args.folder / "seen"
        self._pl, self._samples, self._library = pl, samples, library
        torch.set_num_threads(1)
        pl.seed_everything(self.seed, verbose=False)
        _watch_writes(args.folder / "work", self._seen / f"wrote-{os.getpid()}")

    def strategy(self, ddp: str = "ddp") -> Any:
        """The strategy to train with.

        Args:
            ddp: DDP's, as the library's documentation names it.
        """
        if self.way == "asgd":
            from lightning_asgd import ASGDStrategy

            return ASGDStrategy(nsync=NSYNC)
        return ddp if self.way == "ddp" else "auto"

    def trainer_options(self, ddp: str = "ddp") -> dict[str, Any]:
        """What the Trainer is given on account of the strategy, and the callback that counts.

        Args:
            ddp: DDP's name, as the library's documentation has it.
        """
        return {
            "accelerator": "cpu",
            "devices": self.workers,
            "strategy": self.strategy(ddp),
            "callbacks": [self.counter()],
            "enable_progress_bar": False,
        }

    def counter(self) -> Any:
        """The callback that writes down which samples this process trained."""
        return _counter(self._pl)(self._seen, self._samples)

    def finish(self, **outcome: Any) -> None:
        """Write down how the program ended in this process.

        Args:
            **outcome: ``error``: the metric, lower is better; ``trivial``: the same of a model that knows nothing.
        """
        names = ("torch", self._pl.__name__.split(".")[0].replace("_", "-"), self._library)
        found = {**outcome, "versions": {name: version(name) for name in names}}
        (self._seen / f"finished-{os.getpid()}").write_text(json.dumps(found))


class DataRun(Run):
    """One training over a data set that divides itself; its samples are numbers, and nothing else matters.

    Args:
        library: the package whose version is reported.
        prepare: makes the data, given a folder and the number of samples; called once, before all trainings.
    """

    EPOCHS = 2
    SHARDS = 12
    BATCH = 4

    def __init__(self, library: str, prepare: Callable[[Path, int], None] | None = None) -> None:
        import pytorch_lightning

        super().__init__(pytorch_lightning, torch.Tensor.tolist, library)
        if self.way == "prepare":
            if prepare is not None:
                prepare(self.data, self.samples)
            sys.exit(0)

    def fit(self, data: Any) -> None:
        """Train a module of one weight, and end the script.

        Args:
            data: a loader that makes batches of numbers, or a function that makes such a loader: what a
                ``LightningDataModule`` returns from ``train_dataloader``, which Lightning calls on every rank.
        """
        from pytorch_lightning import LightningDataModule, LightningModule, Trainer

        samples = self.samples

        class One(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(()))

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                return (self.weight - batch.float().mean() / samples) ** 2

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        class Data(LightningDataModule):
            def train_dataloader(self) -> Any:
                return data()

        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
        trainer = Trainer(**self.trainer_options(), **off, max_epochs=self.EPOCHS)
        trainer.fit(One(), Data() if inspect.isroutine(data) else data)
        self.finish()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("prepare", "one", "ddp", "asgd"), default="one")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--processes", type=int, default=0, help="of each worker's data loader")
    parser.add_argument("--samples", type=int, default=0, help="of an epoch, where the program is a data set")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="of this training")
    parser.add_argument("--data", type=Path, required=True, help="of all trainings of this program")
    return parser.parse_args()


def _counter(pl: Any) -> Any:
    class Counter(pl.Callback):
        def __init__(self, seen: Path, samples: Callable[[Any], Iterable[Any]]) -> None:
            self.seen, self.samples = seen, samples

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            line = {"epoch": trainer.current_epoch, "samples": list(self.samples(batch))}
            with (self.seen / f"trained-{os.getpid()}").open("a") as file:
                file.write(json.dumps(line) + "\n")

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def __reduce__(self) -> Any:
            return object, ()  # a library that saves the options of its Trainer needs nothing of this one

    return Counter


def _watch_writes(work: Path, log: Path) -> None:
    """Write down which files this process opens for writing below ``work``, with Python or with ``torch.save``."""
    folder = str(work) + os.sep
    # opened before the hook exists, and written through the descriptor: the hook must not meet itself
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            full = os.path.abspath(os.fsdecode(path))
            if full.startswith(folder):
                os.write(descriptor, (json.dumps(full.removeprefix(folder)) + "\n").encode())

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            note(arguments[0])
        elif event == "os.rename":
            note(arguments[1])

    save = torch.save

    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        note(f)  # torch opens it in C++, where no hook sees it
        return save(obj, f, *args, **kwargs)

    torch.save = saved
    sys.addaudithook(hook)
