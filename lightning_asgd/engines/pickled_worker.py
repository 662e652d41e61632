"""The program of a worker that gets a pickled copy of what it runs: see ``pickled_program``."""

from __future__ import annotations

import pickle
import sys


def run_copy() -> None:
    """Run the Trainer's method as the worker that the environment says."""
    with open(sys.argv[1], "rb") as file:
        sys.path[:] = pickle.load(file)  # before any import: Python has put this file's folder there
        import random

        import torch

        from lightning_asgd.core.job import rank_variables  # noqa: F401  # takes those of this worker

        trainer, function, args, kwargs, state = pickle.load(file)
    torch.set_rng_state(state["torch"])
    random.setstate(state["random"])
    if state["numpy"] is not None:
        import numpy

        numpy.random.set_state(state["numpy"])
    enabled, warn_only = state["deterministic"]
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    precision, newer = state["precision"]
    if newer:
        torch.backends.cuda.matmul.fp32_precision = precision
    else:
        torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(state["dtype"])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = state["cudnn"]
    strategy = trainer.strategy
    strategy.set_world_ranks()  # as when a Trainer is made: the copy has those of worker 0
    try:
        strategy.launcher.launch(function, *args, trainer=trainer, **kwargs)
    except BaseException as error:
        strategy.on_exception(error)
        raise
    finally:
        strategy.leave_job()


if __name__ == "__main__":
    run_copy()
