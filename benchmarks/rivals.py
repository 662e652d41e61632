"""The alternatives that Lightning's users have, and what plain loops of torch have in common with them.

A loop's ranks join in a context that gives each of them an optimizer, whose steps do the exchanges too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Member", "async_sgd", "averaging", "common_store", "local_sgd", "unconnected"]


@dataclass(frozen=True)
class Member:
    """A rank that takes part in a plain loop.

    Attributes:
        optimizer: takes the steps, and exchanges.
        exchanges: tells how often it has exchanged.
        first: exchanges before its window starts.
    """

    optimizer: Any
    exchanges: Callable[[], int]
    first: int = 1


@contextlib.contextmanager
def unconnected(layers: Any, optimizer: Any, rank: int, workers: int, period: int, batch: int) -> Iterator[Member]:
    """A rank that exchanges nothing.

    Args:
        layers: the module that it trains.
        optimizer: torch's, over the module's parameters.
        rank: of this process.
        workers: how many there are.
        period: steps between two exchanges.
        batch: samples in a step.
    """
    yield Member(optimizer, lambda: 0, first=0)


@contextlib.contextmanager
def averaging(layers: Any, optimizer: Any, rank: int, workers: int, period: int, batch: int) -> Iterator[Member]:
    """Local SGD: the weights are replaced by their mean over all ranks, in one all-reduce.

    Arguments as for :func:`unconnected`.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    steps = exchanges = 0

    @torch.no_grad()
    def average(*_: Any) -> None:
        nonlocal steps, exchanges
        steps += 1
        if steps % period:
            return
        weights = parameters_to_vector(layers.parameters())
        dist.all_reduce(weights)
        vector_to_parameters(weights.div_(workers), layers.parameters())
        exchanges += 1

    dist.init_process_group("gloo", rank=rank, world_size=workers)
    optimizer.register_step_post_hook(average)
    yield Member(optimizer, lambda: exchanges)
    dist.destroy_process_group()


@contextlib.contextmanager
def async_sgd(layers: Any, optimizer: Any, rank: int, workers: int, period: int, batch: int) -> Iterator[Member]:
    """A-SGD without a Trainer.

    Arguments as for :func:`unconnected`.
    """
    from lightning_asgd import AsyncSGD

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers))
    with AsyncSGD(layers, optimizer, nsync=period) as asgd:
        yield Member(optimizer, lambda: asgd.stats.exchanges)


def common_store(rank: int, workers: int) -> Any:
    """A key-value store of all ranks, at the address that the launcher has given them."""
    from torch.distributed import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), workers, is_master=rank == 0)


def local_sgd(period: int) -> Any:
    """DDP whose ranks average their weights every so many steps, and exchange no gradients.

    PyTorch's post-local-SGD hook and averager, from the first step on, by Lightning's own arguments.
    """
    import torch.distributed as dist
    from pytorch_lightning.strategies import DDPStrategy
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook

    class LocalSGD(DDPStrategy):
        def configure_ddp(self) -> None:
            super().configure_ddp()
            # Gradients are averaged over a subgroup: every rank is one. Lightning registers hooks on GPUs only.
            subgroup, _ = dist.new_subgroups(1)
            self.model.register_comm_hook(
                hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=0), hook.post_localSGD_hook
            )

    state = hook.PostLocalSGDState(None, None, start_localSGD_iter=0)
    return LocalSGD(ddp_comm_state=state, ddp_comm_hook=hook.post_localSGD_hook, model_averaging_period=period)
