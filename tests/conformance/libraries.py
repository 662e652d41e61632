"""Cases: what programs of others ask of ``torch.distributed`` and the environment, and do with it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe, get_worker_info

from tests.conformance.case import case
from tests.conformance.lab import BATCH, SAMPLES, WORKERS, Lab, dataset

LIBRARIES = "Libraries that ask torch.distributed"


def world() -> tuple[bool, int, int]:
    return dist.is_initialized(), dist.get_rank(), dist.get_world_size()


@case(LIBRARIES, "`torch.distributed.is_initialized()`, `get_rank`, `get_world_size`, from `setup` until after `fit`")
def place_in_the_world(lab: Lab) -> Any:
    told = []

    class Asks:
        def setup(self: Any, stage: str) -> None:
            told.append(world())

        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            told.append(world())
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self: Any) -> None:
            told.append(world())

    lab.fit(lab.regression(Asks))
    assert set(told) == {world()} == {(True, lab.rank, WORKERS)}
    return {"told": sorted(set(told))}


@case(
    LIBRARIES,
    "`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GLOBAL_RANK`, `NODE_RANK`, `NNODES`",
    note="As under torchrun, with every launcher.",
    ddp=False,
)
def variables(lab: Lab) -> Any:
    names = ("RANK", "GLOBAL_RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES")
    told = []

    class Asks:
        def train_dataloader(self: Any) -> Any:
            told.append([os.environ.get(name) for name in names])
            return lab.loader()

    lab.trainer(max_epochs=1).fit(lab.regression(Asks))
    told.append([os.environ.get(name) for name in names])
    rank, size = str(lab.rank), str(WORKERS)
    assert told == [[rank, rank, rank, size, size, "0", "1"]] * 2
    return {}


@case(LIBRARIES, "collectives of `torch.distributed` at the ends of epochs and after `fit`")
def raw_collectives(lab: Lab) -> Any:
    heard: list[Any] = []

    def talk() -> None:
        total, objects, said = torch.tensor([lab.rank + 1.0]), [None] * WORKERS, [{"from": lab.rank}]
        dist.all_reduce(total)
        dist.all_gather_object(objects, {"rank": lab.rank})
        dist.broadcast_object_list(said, src=1)
        dist.barrier()
        gathered = [torch.zeros(2) for _ in range(WORKERS)]
        dist.all_gather(gathered, torch.full((2,), float(lab.rank)))
        heard.append([total.item(), objects, said, [t.tolist() for t in gathered]])

    class Raw:
        def on_train_epoch_end(self: Any) -> None:
            talk()

    lab.fit(lab.regression(Raw))
    talk()
    expected = [3.0, [{"rank": 0}, {"rank": 1}], [{"from": 1}], [[0.0, 0.0], [1.0, 1.0]]]
    assert heard == [expected] * 3
    return {"heard": heard}


@case(LIBRARIES, "`trainer.strategy.reduce`, `broadcast`, `all_gather` and `barrier` after `fit`")
def after_fit(lab: Lab) -> Any:
    trainer = lab.fit()
    strategy, file = trainer.strategy, lab.folder / "after.ckpt"
    total = float(strategy.reduce(torch.tensor(lab.rank + 1.0), reduce_op="sum"))
    said = strategy.broadcast({"from": lab.rank}, src=1)
    gathered = strategy.all_gather(torch.tensor(float(lab.rank))).flatten().tolist()
    trainer.save_checkpoint(file)
    assert file.exists()  # it was written before anybody went on
    assert (total, said, gathered) == (3.0, {"from": 1}, [0.0, 1.0])
    return {"total": total, "said": said, "gathered": gathered}


@case(
    LIBRARIES,
    "collectives of `torch.distributed` in a training step",
    refused="CollectiveUnavailableError: torch.distributed.all_reduce was called in the asynchronous phase",
    note="No worker waits there. Call them at the end of an epoch, or turn off the library's synchronisation.",
)
def collectives_in_a_step(lab: Lab) -> Any:
    class Raw:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            dist.all_reduce(loss.detach().clone())
            return loss

    lab.fit(lab.regression(Raw))


@case(
    LIBRARIES,
    "`DistributedDataParallel` inside the module",
    refused="ConfigurationError: The module's part 'net' is a DistributedDataParallel",
    note="It would put all workers in lock-step.",
    ddp=False,
)
def nested_ddp(lab: Lab) -> Any:
    class Nested:
        def configure_model(self: Any) -> None:
            self.net = nn.parallel.DistributedDataParallel(self.net)

    lab.fit(lab.regression(Nested))


@case(
    LIBRARIES,
    "`SyncBatchNorm` layers",
    note="Each worker normalises by its own batches. DDP fails on CPUs.",
    ddp_fails=True,
)
def sync_batch_norm_layers(lab: Lab) -> Any:
    class Normalised:
        def build(self: Any) -> None:
            self.net = nn.Sequential(nn.Linear(8, 16), nn.SyncBatchNorm(16), nn.ReLU(), nn.Linear(16, 1))

    lab.fit(lab.regression(Normalised))


@case(LIBRARIES, "`new_group` of all ranks, of one rank, and with a backend of torch's own")
def groups(lab: Lab) -> Any:
    heard = []

    class Grouped:
        def on_fit_start(self: Any) -> None:
            self.groups = [dist.new_group(), dist.new_group([0]), dist.new_group([1]), dist.new_group(backend="gloo")]

        def on_train_epoch_end(self: Any) -> None:
            everybody, *single, gloo = self.groups
            for group in (everybody, single[lab.rank], gloo):
                total = torch.tensor([lab.rank + 1.0])
                dist.all_reduce(total, group=group)
                heard.append((dist.get_rank(group), dist.get_world_size(group), total.item()))

        def on_fit_end(self: Any) -> None:
            self.groups = []

    lab.fit(lab.regression(Grouped), max_epochs=1)
    assert heard == [(lab.rank, 2, 3.0), (0, 1, lab.rank + 1.0), (lab.rank, 2, 3.0)]
    return {"heard": heard}


@case(LIBRARIES, "`DeviceMesh` and `DTensor` at the ends of epochs")
def device_mesh(lab: Lab) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    seen = []

    class Meshed:
        def on_train_epoch_end(self: Any) -> None:
            mesh = init_device_mesh("cpu", (WORKERS,))
            sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
            seen.append((sharded.to_local().tolist(), sharded.full_tensor().tolist()))

    lab.fit(lab.regression(Meshed), max_epochs=1)
    mine = [0.0, 1.0] if lab.rank == 0 else [2.0, 3.0]
    assert seen == [(mine, [0.0, 1.0, 2.0, 3.0])]
    return {"seen": seen}


@case(
    LIBRARIES,
    "a torchmetrics metric that is made and computed in a training step",
    note="It computes this worker's value.",
)
def metric_in_a_step(lab: Lab) -> Any:
    import torchmetrics

    values = []

    class Measured:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            metric = torchmetrics.SumMetric(sync_on_compute=lab.asynchronous)
            metric.update(lab.rank + 1.0)
            values.append(float(metric.compute()))
            return super().training_step(batch, batch_idx)

    lab.fit(lab.regression(Measured))
    assert set(values) == {lab.rank + 1.0}
    return {"values": sorted(set(values))}


@case(LIBRARIES, "a `DistributedSampler` without arguments, with `use_distributed_sampler=False`")
def sampler_without_arguments(lab: Lab) -> Any:
    class Sampled:
        def train_dataloader(self: Any) -> Any:
            return DataLoader(Numbered(), BATCH, sampler=DistributedSampler(Numbered(), shuffle=False))

    return {"samples": trained(lab, Sampled, use_distributed_sampler=False)}


@case(LIBRARIES, "an iterable data set that divides itself by `torch.distributed`")
def stream_by_torch(lab: Lab) -> Any:
    class Streamed:
        def train_dataloader(self: Any) -> Any:
            return DataLoader(Divided(), BATCH)

    return {"samples": trained(lab, Streamed)}


@case(LIBRARIES, "the same with loader processes")
def stream_by_torch_in_processes(lab: Lab) -> Any:
    class Streamed:
        def train_dataloader(self: Any) -> Any:
            return DataLoader(Divided(), BATCH, num_workers=2, multiprocessing_context="fork")

    return {"samples": trained(lab, Streamed)}


@case(LIBRARIES, "an `IterDataPipe`, whose loader agrees on a seed through a process group")
def datapipe(lab: Lab) -> Any:
    class Piped:
        def train_dataloader(self: Any) -> Any:
            return DataLoader(Pipe().sharding_filter(), BATCH)

    return {"samples": trained(lab, Piped)}


@case(LIBRARIES, "Lightning's advice to log with `sync_dist=True` at the end of an epoch")
def advice(lab: Lab) -> Any:
    class Logs:
        def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
            self.log("mine", self.loss(batch))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lab.fit(lab.regression(Logs), max_epochs=1)
    advised = any("It is recommended to use `self.log('mine', ..., sync_dist=True)`" in str(w.message) for w in caught)
    assert advised == (lab.rank == 0)  # where Lightning warns
    return {"advised": advised}


class Numbered(torch.utils.data.Dataset[Any]):
    """The regression's data, each with its number."""

    def __init__(self) -> None:
        self.data = dataset()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return (*self.data[index], index)


class Divided(IterableDataset[Any]):
    """Yields the part of this rank and loader process."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        data = Numbered()
        first, step = dist.get_rank() * parts + part, dist.get_world_size() * parts
        yield from (data[i] for i in range(first, SAMPLES, step))


class Pipe(IterDataPipe[Any]):
    """All of them."""

    def __iter__(self) -> Iterator[Any]:
        data = Numbered()
        yield from (data[i] for i in range(SAMPLES))


def trained(lab: Lab, override: type, **options: Any) -> int:
    """Train an epoch.

    Returns:
        the number of samples, all workers together.
    """
    mine: list[int] = []

    class Notes:
        def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            mine.extend(batch[2].tolist())
            return super().training_step(batch[:2], batch_idx)

    module = lab.regression(type("Data", (override, Notes), {}))
    lab.trainer(max_epochs=1, **options).fit(module)
    everybody: list[Any] = [None] * WORKERS
    dist.all_gather_object(everybody, mine)
    assert sorted(number for numbers in everybody for number in numbers) == list(range(SAMPLES))
    return sum(map(len, everybody))
