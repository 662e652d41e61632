"""The loader processes of a training dataloader whose data are read shard by shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_asgd.core.leases.sampler import load_next
from lightning_asgd.streams.find import batch_of, collate_of, shards_in
from lightning_asgd.streams.sharded_data import ShardedData
from lightning_asgd.streams.step_maker import MadeStep, StepMaker, StepOrder


class LoaderProcesses:
    """As many processes as a dataloader has, each a dataloader of its own, so that it is known which makes a step.

    ``seed`` is the program's: the order of the shards begins at it.
    """

    def __init__(self, loader: DataLoader[Any], data: ShardedData, seed: int) -> None:
        self.count = loader.num_workers
        self._loader = loader
        self._steps = _Steps(loader, data, seed)
        self._epoch = 0
        self._orders: list[_Orders] = []
        self._made: list[Any] = []  # iterators
        self._waiting = [0] * self.count  # steps that were asked for and not got

    def begin(self, epoch: int) -> int:
        """An epoch begins. Returns how many steps are to be granted in advance, one of them to be trained meanwhile."""
        self._epoch = epoch
        return 1 + self.count * int(self._loader.prefetch_factor or 1)

    def ask(self, process: int, order: StepOrder) -> None:
        """Have a process make a step."""
        if not self._made:
            self._start()
        orders = self._orders[process]
        given = self._waiting[process] - len(orders)
        orders.append((self._epoch, order))
        self._waiting[process] += 1
        if given < int(self._loader.prefetch_factor or 1):
            load_next(self._made[process])

    def get(self, process: int) -> MadeStep:
        """The first of the steps that a process was asked for and that have not been got. Waits for it."""
        made: MadeStep = next(self._made[process])
        self._waiting[process] -= 1
        return made

    def close(self) -> None:
        """The epoch is over: end the processes, unless they are to stay and have made all that they were asked for."""
        if not self._loader.persistent_workers or any(self._waiting):
            self.stop()

    def stop(self) -> None:
        """End the processes."""
        self._made.clear()
        self._orders.clear()
        self._waiting = [0] * self.count

    def _start(self) -> None:
        loader = self._loader
        for process in range(self.count):
            orders = _Orders()
            options: dict[str, Any] = {
                "num_workers": 1,
                "prefetch_factor": loader.prefetch_factor,
                "timeout": loader.timeout,
                "multiprocessing_context": loader.multiprocessing_context,
                "worker_init_fn": InitCalls([loader], process),
                "collate_fn": same,
            }
            self._orders.append(orders)
            made: Any = DataLoader(self._steps, batch_size=None, sampler=orders, **options)
            self._made.append(iter(made))


class _Orders(deque[tuple[int, StepOrder]]):
    """A sampler that yields what a process is asked for. It may yield again after there was nothing."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[int, StepOrder]:
        if not self:
            raise StopIteration
        return self.popleft()


class _Steps(Dataset[MadeStep]):
    """A data set whose samples are steps; a copy of it is in each process."""

    def __init__(self, loader: DataLoader[Any], data: ShardedData, seed: int) -> None:
        self._dataset, self._convert = loader.dataset, loader.collate_fn
        self._batches = batch_of(loader, data) > 0
        self._seed, self._drawn = seed, data.seed
        self._epoch = -1
        self._maker: StepMaker | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is not forked: it reads nothing yet."""
        return {**vars(self), "_maker": None}

    def __getattr__(self, name: str) -> Any:
        """Of the program's data set: ``worker_init_fn`` looks for it in ``get_worker_info().dataset``."""
        if name == "_dataset":  # while it is being copied
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, asked: tuple[int, StepOrder]) -> MadeStep:
        epoch, order = asked
        if self._maker is None or epoch != self._epoch:
            if self._maker is not None:
                self._maker.close()
            self._epoch, self._maker = epoch, self._begin(epoch)
        return self._maker.make(order)

    def _begin(self, epoch: int) -> StepMaker:
        found = shards_in(self._dataset)
        if isinstance(found, str):
            raise RuntimeError(f"The data set has no shards in a loader process: {found}.")
        data = found if self._drawn is None else found.seeded(self._drawn)
        shards, collate = data.order(epoch, self._seed), collate_of(self._convert, data)

        def read(shard: int, start: int) -> Iterator[Any]:
            return data.read(epoch, shards[shard], start)

        return StepMaker(read, data.ends(shards), collate if self._batches else lambda samples: collate(samples[0]))


class InitCalls:
    """Calls the ``worker_init_fn`` of dataloaders in a process; with ``number``, if torch's is another.

    During a call ``get_worker_info().dataset`` is the data set of that dataloader, which the program knows.
    """

    def __init__(self, loaders: Sequence[Any], number: int | None = None) -> None:
        calls = ((each.worker_init_fn, each.dataset) for each in loaders)
        self._calls, self._number = [(call, dataset) for call, dataset in calls if call is not None], number

    def __call__(self, worker: int) -> None:
        """Call them."""
        info = get_worker_info()
        read = getattr(info, "dataset", None)
        for call, dataset in self._calls:
            object.__setattr__(info, "dataset", dataset)  # it is read-only
            try:
                call(worker if self._number is None else self._number)
            finally:
                object.__setattr__(info, "dataset", read)


def same(batch: Any) -> Any:
    """A batch as it is, for a dataloader that is not to make one."""
    return batch
