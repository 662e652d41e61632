"""Samples per second of a data loader over files that are not in memory, with a cache of none, half and all of them.

The operating system drops the files from memory before every epoch, as if they did not fit. With --delay each read also
takes that much longer, as from storage over a network. First epochs fill the cache and are not counted. Runs are
interleaved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_asgd.data_stalls.cache import CachedDataset
from lightning_asgd.data_stalls.probe import forget

SHARES = (0.0, 0.5, 1.0)  # of the dataset that the cache may hold
SLACK = 1.01  # samples are kept pickled


class Files:
    """A dataset of files' bytes."""

    def __init__(self, paths: list[Path], delay_s: float) -> None:
        self.paths, self.delay_s = paths, delay_s

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        time.sleep(self.delay_s)
        return self.paths[index].read_bytes()


def epoch_s(dataset: Any, folder: Path, processes: int) -> float:
    """Seconds of an epoch over files that are not in memory."""
    forget(folder)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=processes, collate_fn=list)
    begun = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--size", type=int, default=100_000, metavar="BYTES", help="of a file (default %(default)s)")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="that reading a file takes longer")
    parser.add_argument("--processes", type=int, default=2, help="of the data loader")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files are made: on the storage that is to be measured")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        paths = [folder / str(number) for number in range(args.files)]
        for path in paths:
            path.write_bytes(os.urandom(args.size))
        os.sync()  # what has not been written cannot be forgotten
        source = Files(paths, args.delay)
        limit = int(args.files * args.size * SLACK)
        datasets = {share: CachedDataset(source, int(share * limit)) if share else source for share in SHARES}
        seconds: dict[float, list[float]] = {share: [] for share in SHARES}
        for repeat in range(args.repeats + 1):
            for share, dataset in datasets.items():
                took_s = epoch_s(dataset, folder, args.processes)
                if repeat:
                    seconds[share].append(took_s)
    table = Table("cached", "samples/s", "min", "max", "of without")
    medians = {share: statistics.median(values) for share, values in seconds.items()}
    for share, values in seconds.items():
        rates = [args.files / s for s in (medians[share], max(values), min(values))]
        table.add_row(f"{share:.0%}", *(f"{rate:,.0f}" for rate in rates), f"{medians[0.0] / medians[share]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
