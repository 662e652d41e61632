"""Workers of a program that cannot be started once more, such as a trial of Ray Tune: they get a pickled copy of it.

Lightning's launcher runs ``sys.argv`` again for every further worker. In a process of Ray's that is Ray's own program.
Here it is :mod:`lightning_asgd.engines.pickled_worker`, with the name of a file that holds the Trainer, its method and
the method's arguments.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.job import supervisor

_SCRIPT = str(Path(__file__).with_name("pickled_worker.py"))


class PickledTrainer:
    """A Trainer's method for workers to come. Raises a :class:`ConfigurationError` if it cannot be pickled."""

    def __init__(self, trainer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        from ray import cloudpickle

        if trainer is None:
            raise ConfigurationError(
                "Fabric(devices=...) was used with several devices in a process of Ray's. Expected one device there: "
                "Ray's own program cannot be started once more."
            )
        try:
            data = cloudpickle.dumps((trainer, function, args, kwargs, _process_state()))
        except Exception as error:
            raise ConfigurationError(
                f"A Trainer with several workers is used in a process of Ray's, but cannot be pickled: {error}. "
                "Expected a Trainer, module and data that can be: the other workers get copies of them."
            ) from error
        self._folder = tempfile.mkdtemp(prefix="lightning_asgd-")
        supervisor.ensure_watch().remove_if_killed(self._folder)
        self._path = Path(self._folder, "program")
        self._path.write_bytes(pickle.dumps(sys.path) + data)

    @contextlib.contextmanager
    def as_script(self) -> Iterator[None]:
        """Have Lightning's launcher start it in place of the script."""
        before, sys.argv = sys.argv, [_SCRIPT, str(self._path)]
        try:
            yield
        finally:
            sys.argv = before

    def remove(self) -> None:
        """Remove its file, which all workers have read."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _process_state() -> dict[str, Any]:
    """What a script that is run again sets in its process, by itself or with ``Trainer(deterministic=True)``."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "dtype": torch.get_default_dtype(),
        "precision": _precision(),
        "cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
    }


def _precision() -> tuple[str, bool]:
    """The precision of float32 matrix products, and whether a program has set it with the newer functions of torch."""
    try:
        return torch.get_float32_matmul_precision(), False
    except RuntimeError:
        return torch.backends.cuda.matmul.fp32_precision, True


def program_in_task(*program: Any) -> PickledTrainer | None:
    """The program of a worker of Ray's, whose script cannot be started once more; None in other processes."""
    ray = sys.modules.get("ray")
    in_task = ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE
    return PickledTrainer(*program) if in_task else None
