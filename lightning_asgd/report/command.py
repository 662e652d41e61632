"""``lightning-asgd report``: a page about a run."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.report.bundle import pack


def report(run_dir: str, *, out: str | None = None, bundle: Path | bool = False) -> int | None:
    """Write a page about a run from its logs.

    The page shows the training error, what each worker waited for, throughput, staleness and traffic. It is one HTML
    file that contains its pictures. The pictures are also written beside it, as PNG files.

    Args:
        run_dir: folder or URL of the run's logs, where an ASGDMonitor has written asgd.jsonl, or a folder above it.
        out: folder to write to. The default is "report" in the run's folder, or in the current folder if the logs are
            at a URL.
        bundle: write a .zip file for a bug report too, by default into the current folder. It holds the run's logs,
            metrics, page and order of events, and what `lightning-asgd doctor` says; no checkpoints and no secrets.

    Raises:
        ConfigurationError: the folder holds no such file, or several; or matplotlib is missing; or a file cannot be
            written.
    """
    if bundle and out is not None:
        raise ConfigurationError(f"out={out} was given with bundle, which writes into the run's folder. Expected one.")
    if bundle:
        return pack(run_dir, bundle if isinstance(bundle, Path) else None, lambda: report(run_dir))
    from lightning_asgd.monitor.metric_log import find_log, read  # here, since they import torch

    file = find_log(run_dir)
    fits = read(file)
    try:
        from lightning_asgd.report.page import write
    except ImportError as error:
        raise ConfigurationError(f"The report needs {error.name}: pip install rich matplotlib") from error
    about = f"the last of {len(fits)} fits" if len(fits) > 1 else ""
    beside = file.parent if isinstance(file, Path) else Path()
    folder = beside / "report" if out is None else Path(out)
    try:
        page = write(fits[-1], folder, about=about)
    except OSError as error:
        raise ConfigurationError(
            f"The page cannot be written to {str(folder)!r}: {error}. Expected a writable folder: pass --out."
        ) from error
    sys.stdout.write(f"Report: {page}\n")
    return None
