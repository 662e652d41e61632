"""One worker, or one job, of streams.py: a data set of numbers, and a module that learns how often each was applied."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import pytorch_lightning as pl
import torch
from counts import fit
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

warnings.filterwarnings("ignore")

BATCH, SHARDS = 8, 10


class Counts(pl.LightningModule):
    """Adds 1 to a sample's parameter when it is trained. The server's sum says what was applied."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.seen = torch.nn.Parameter(torch.zeros(args.samples))
        self.args = args
        self.epochs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        slow = self.global_rank % 2 == 1 or self.args.name == "late"
        time.sleep(self.args.slow if slow else self.args.step)
        last = self.global_rank == self.trainer.world_size - 1
        if self.args.kill and last and self.current_epoch == 0 and batch_idx == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return -self.seen[torch.cat(list(tensors(batch)))].sum()

    def on_train_epoch_start(self) -> None:
        self._begun = time.monotonic()

    def on_train_epoch_end(self) -> None:
        self.epochs.append(time.monotonic() - self._begun)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The numbers in a batch, which several loaders may have made: the lists and dictionaries of tensors that it is."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif batch is not None:
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors(part)


class Own(IterableDataset[int]):
    """A data set of the user's own with shards."""

    num_shards = SHARDS

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def open_shard(self, epoch: int, shard: int, start: int) -> Iterator[int]:
        length = self.samples // SHARDS
        yield from range(shard * length + start, (shard + 1) * length)

    def __iter__(self) -> Iterator[int]:
        process = get_worker_info()
        for shard in range(SHARDS) if process is None else range(process.id, SHARDS, process.num_workers):
            yield from self.open_shard(0, shard, 0)


def numbers(items: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([item["number"] for item in items])


def item(number: int) -> dict[str, int]:
    return {"number": number}


def first(sample: Any) -> Any:
    return sample[0]


def own(folder: Path, samples: int, *, processes: int = 0) -> Any:
    return DataLoader(Own(samples), batch_size=BATCH, num_workers=processes)


def mapped(folder: Path, samples: int, *, processes: int = 0) -> Any:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=BATCH, shuffle=True, num_workers=processes)


def weighted(folder: Path, samples: int) -> Any:
    sampler = WeightedRandomSampler([1.0] * samples, samples, replacement=False)
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=BATCH, sampler=sampler)


def batches(folder: Path, samples: int) -> Any:
    sampler = BatchSampler(range(samples), BATCH, drop_last=False)
    return DataLoader(TensorDataset(torch.arange(samples)), batch_sampler=sampler)


def combined(mode: str, share: float) -> Callable[[Path, int], Any]:
    """Two loaders. One has a share of the samples, the other the rest."""

    def make(folder: Path, samples: int) -> Any:
        a, b = torch.arange(samples).split([int(share * samples), samples - int(share * samples)])
        parts = {name: DataLoader(TensorDataset(part), BATCH, shuffle=True) for name, part in (("a", a), ("b", b))}
        return CombinedLoader(parts, mode)

    return make


def stateful(folder: Path, samples: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(TensorDataset(torch.arange(samples)), batch_size=BATCH, shuffle=True)


def datasets_map(folder: Path, samples: int) -> Any:
    from datasets import Dataset

    return DataLoader(Dataset.from_dict({"number": list(range(samples))}), BATCH, shuffle=True, collate_fn=numbers)


def datasets_iterable(folder: Path, samples: int, *, split: bool = False, processes: int = 0) -> Any:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    data = Dataset.from_dict({"number": list(range(samples))}).to_iterable_dataset(num_shards=SHARDS)
    data = data.shuffle(seed=3, buffer_size=20)
    if split:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        data = split_dataset_by_node(data, rank=rank, world_size=world)
    return DataLoader(data, batch_size=BATCH, collate_fn=numbers, num_workers=processes)


def datasets_split(folder: Path, samples: int) -> Any:
    return datasets_iterable(folder, samples, split=True)


def web(folder: Path, samples: int) -> Any:
    import webdataset

    if not folder.exists():
        folder.mkdir()
        with webdataset.ShardWriter(f"{folder}/n-%02d.tar", maxcount=samples // SHARDS, verbose=0) as writer:
            for number in range(samples):
                writer.write({"__key__": f"{number:06d}", "cls": number})
    files = f"{folder}/n-{{00..{SHARDS - 1:02d}}}.tar"
    data = webdataset.WebDataset(files, nodesplitter=webdataset.split_by_node, shardshuffle=100)
    return data.shuffle(20).decode().to_tuple("cls").map(first)


def webdataset_loader(folder: Path, samples: int, *, processes: int = 0) -> Any:
    return DataLoader(web(folder, samples), batch_size=BATCH, num_workers=processes)


def webdataset_batched(folder: Path, samples: int) -> Any:
    import webdataset

    return webdataset.WebLoader(web(folder, samples).batched(BATCH, collation_fn=torch.tensor), batch_size=None)


def litdata(folder: Path, samples: int, *, processes: int = 0) -> Any:
    import litdata

    if not folder.exists():
        litdata.optimize(
            item, list(range(samples)), output_dir=str(folder), chunk_size=samples // SHARDS, num_workers=1
        )
    data = litdata.StreamingDataset(str(folder), shuffle=True)
    return litdata.StreamingDataLoader(data, batch_size=BATCH, collate_fn=numbers, num_workers=processes)


def mosaic(folder: Path, samples: int, *, processes: int = 0) -> Any:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=400) as writer:
            for number in range(samples):
                writer.write(item(number))
    data = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    return StreamingDataLoader(data, batch_size=BATCH, collate_fn=numbers, num_workers=processes)


def geometric(folder: Path, samples: int) -> Any:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader

    class Graphs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return samples

        def __getitem__(self, number: int) -> Any:
            return Data(x=torch.zeros(2, 1), edge_index=torch.tensor([[0], [1]]), number=torch.tensor([number]))

    return GraphLoader(Graphs(), batch_size=BATCH, shuffle=True)


DATA: dict[str, Callable[[Path, int], Any]] = {
    "map": mapped,
    "weighted sampler": weighted,
    "batch sampler": batches,
    "own shards": own,
    "datasets": datasets_map,
    "datasets, iterable": datasets_iterable,
    "datasets, split_dataset_by_node": datasets_split,
    "WebDataset": webdataset_loader,
    "WebDataset, batched, WebLoader": webdataset_batched,
    "LitData": litdata,
    "MosaicML streaming": mosaic,
    "own shards, 2 processes": partial(own, processes=2),
    "datasets, iterable, 2 processes": partial(datasets_iterable, processes=2),
    "WebDataset, 2 processes": partial(webdataset_loader, processes=2),
    "LitData, 2 processes": partial(litdata, processes=2),
    "MosaicML streaming, 2 processes": partial(mosaic, processes=2),
    "map, 1 process": partial(mapped, processes=1),
    "datasets, iterable, 1 process": partial(datasets_iterable, processes=1),
    "datasets, split_dataset_by_node, 1 process": partial(datasets_iterable, split=True, processes=1),
    "WebDataset, 1 process": partial(webdataset_loader, processes=1),
    "StatefulDataLoader": stateful,
    "CombinedLoader, min_size": combined("min_size", 0.5),
    "CombinedLoader, max_size": combined("max_size", 0.3),
    "CombinedLoader, max_size_cycle": combined("max_size_cycle", 0.5),
    "PyTorch Geometric": geometric,
}


class Module(pl.LightningDataModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args

    def train_dataloader(self) -> Any:
        return DATA[self.args.data](self.args.folder / self.args.data.replace(" ", "-"), self.args.samples)


class GraphCounts(Counts):
    """Counts of graphs."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch.number, batch_idx)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=DATA)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--step", type=float, default=0.01, metavar="SECONDS")
    parser.add_argument("--slow", type=float, default=0.05, metavar="SECONDS")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--run")
    parser.add_argument("--name", default="job")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.data == "PyTorch Geometric":  # Lightning cannot make a loader again whose class it has not seen before
        import torch_geometric.loader  # noqa: F401
    pl.seed_everything(1, verbose=False)
    module = GraphCounts(args) if args.data == "PyTorch Geometric" else Counts(args)
    if args.ddp:
        strategy: Any = "ddp"
    else:
        from lightning_asgd import ASGDStrategy, Timeouts
        from lightning_asgd.algorithms import ASGD

        run = {"run": args.run} if args.run else {}
        strategy = ASGDStrategy(nsync=5, algorithm=ASGD("sum"), timeouts=Timeouts(silence_s=3), **run)
    workers = 1 if args.run else args.workers
    trainer = fit(module, (Module(args),), devices=workers, strategy=strategy, max_epochs=args.epochs)
    if trainer.is_global_zero:
        about = {"seen": [round(n) for n in module.seen.tolist()], "epochs": module.epochs}
        (args.folder / f"{args.name}.json").write_text(json.dumps(about))


if __name__ == "__main__":
    main()
