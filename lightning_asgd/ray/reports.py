"""Metrics and checkpoints from the workers of a run to its driver, by way of the storage of the cluster."""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
from ray.train import Checkpoint

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning.class_trees import CallbackExtension, Extension

log = logging.getLogger(__name__)

CHECKPOINT_FILE = "checkpoint.ckpt"
"""Lightning's checkpoint in the folder of a Ray checkpoint, as Ray's own callback names it."""
_MARKER, _COMPLETE = ".lightning_asgd", ".complete"


@dataclass(frozen=True)
class Storage:
    """A run's folder in storage that all nodes reach."""

    filesystem: Any  # pyarrow's
    path: str

    @classmethod
    def of(cls, storage_path: str, name: str, filesystem: Any = None) -> Storage:
        """The folder ``name`` below a path or URI."""
        if filesystem is not None:
            return cls(filesystem, f"{storage_path.rstrip('/')}/{name}")
        if "://" in storage_path:
            filesystem, path = pyarrow.fs.FileSystem.from_uri(storage_path)
            return cls(filesystem, f"{path.rstrip('/')}/{name}")
        return cls(pyarrow.fs.LocalFileSystem(), str(Path(storage_path).expanduser().resolve() / name))

    def create(self) -> list[str]:
        """Make the folder. Returns the checkpoints that are there already, oldest first."""
        self.filesystem.create_dir(self.path)
        with self.filesystem.open_output_stream(f"{self.path}/{_MARKER}"):
            pass
        found = self.filesystem.get_file_info(pyarrow.fs.FileSelector(self.path))
        names = {each.base_name for each in found}
        return sorted(name for name in names if _is_checkpoint(name) and name + _COMPLETE in names)

    def upload(self, folder: str, name: str) -> None:
        """Copy a local folder to here. Raises a :class:`ConfigurationError` if this node has other storage."""
        marker = self.filesystem.get_file_info(f"{self.path}/{_MARKER}")
        if marker.type == pyarrow.fs.FileType.NotFound:
            raise ConfigurationError(
                f"Node {socket.gethostname()} does not find the folder {self.path} that the driver has made. Expected "
                "storage that all nodes share: give RunConfig(storage_path=...) a folder on a network file system, or "
                "a URI such as s3://bucket/runs."
            )
        self.filesystem.create_dir(f"{self.path}/{name}")
        pyarrow.fs.copy_files(folder, f"{self.path}/{name}", destination_filesystem=self.filesystem)
        with self.filesystem.open_output_stream(f"{self.path}/{name}{_COMPLETE}"):
            pass  # else the process died meanwhile

    def remove(self, name: str) -> None:
        """Remove a checkpoint. A failure to do so is only reported."""
        try:
            self.filesystem.delete_file(f"{self.path}/{name}{_COMPLETE}")
            self.filesystem.delete_dir(f"{self.path}/{name}")
        except OSError as error:
            log.warning("The old checkpoint %s/%s could not be removed: %s", self.path, name, error)

    def checkpoint(self, name: str) -> Any:
        """One of the checkpoints here."""
        return Checkpoint(f"{self.path}/{name}", self.filesystem)


def _is_checkpoint(name: str) -> bool:
    return name.startswith("checkpoint_") and name.rpartition("_")[2].isdecimal()


@dataclass(frozen=True)
class _Worker:
    """This process, while it runs a training function."""

    number: int
    board: Any
    storage: Storage


_worker: _Worker | None = None


def enter(number: int, board: Any, storage: Storage) -> None:
    """This process runs a training function from now on."""
    global _worker
    _worker = _Worker(number, board, storage)


def leave() -> None:
    """The training function has ended."""
    global _worker
    _worker = None


def _here(what: str) -> _Worker:
    if _worker is None:
        raise ConfigurationError(f"{what} was called outside of a run. Expected a training function of ASGDTrainer.")
    return _worker


def report_metrics(metrics: dict[str, Any], checkpoint: Callable[[str], object] | None = None) -> None:
    """Report metrics, and perhaps a checkpoint, to the driver. Returns without waiting for other workers.

    Unlike ``ray.train.report`` it is for the chief alone, and no barrier: workers take their steps at different times.

    Args:
        metrics: plain values by name.
        checkpoint: writes the checkpoint's files into the folder that it is given.

    Raises:
        ConfigurationError: this process is no worker of an :class:`ASGDTrainer`, or its node has no such storage.
    """
    here = _here("lightning_asgd.ray.report_metrics()")
    name = None
    if checkpoint is not None:
        name = ray.get(here.board.next_checkpoint.remote())
        with tempfile.TemporaryDirectory() as folder:
            checkpoint(folder)
            here.storage.upload(folder, name)
    for dropped in ray.get(here.board.add.remote(metrics, name)):
        here.storage.remove(dropped)


def get_checkpoint() -> Any:
    """The latest checkpoint of this run, as a ``ray.train.Checkpoint``; None if there is none.

    Raises a :class:`ConfigurationError` if this process is no worker of an :class:`ASGDTrainer`.
    """
    here = _here("lightning_asgd.ray.get_checkpoint()")
    name = ray.get(here.board.latest.remote())
    return None if name is None else here.storage.checkpoint(name)


class ReportCallback(CallbackExtension, Extension):  # type: ignore[misc]
    """Reports the metrics and a checkpoint at the end of every epoch, on the chief. Extends Lightning's ``Callback``.

    A checkpoint is a folder with the file ``checkpoint.ckpt``, as that of Ray's own ``RayTrainReportCallback``.

    Args:
        checkpoints: whether checkpoints are reported too.
    """

    def __init__(self, checkpoints: bool = True) -> None:
        self.checkpoints = checkpoints

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Report what the Trainer has logged."""
        if not trainer.is_global_zero:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}

        def save(folder: str) -> None:
            trainer.save_checkpoint(f"{folder}/{CHECKPOINT_FILE}")

        report_metrics(metrics, save if self.checkpoints else None)
