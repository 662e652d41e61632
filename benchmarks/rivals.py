"""The alternatives that Lightning's users have, and what plain loops of torch have in common with them.

A loop's ranks join in a context that gives each of them an optimizer, whose steps do the exchanges too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

__all__ = ["Member", "async_sgd", "averaging", "common_store", "local_sgd", "unconnected"]


REQUIREMENTS = ("torchft==0.2.0", "hivemind==1.1.12")


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


REQUIREMENT = "torchft==0.2.0"


@contextlib.contextmanager
def replica_group(layers: Any, optimizer: Any, rank: int, workers: int, period: int, batch: int) -> Iterator[Member]:
    """A group of one rank; rank 0 runs the Lighthouse as well. Arguments as for :func:`unconnected`."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import LocalSGD

    store = common_store(rank, workers)
    if rank == 0:
        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=workers)
        store.set("lighthouse", lighthouse.address())
    own = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the ranks of one group

    def state() -> dict[str, Any]:
        return {"layers": layers.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        layers.load_state_dict(state["layers"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=workers,
        use_async_quorum=False,  # as its own tests of local SGD
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=own.port,
        lighthouse_addr=store.get("lighthouse").decode(),
        replica_id=str(rank),
        hostname="127.0.0.1",
    )
    with LocalSGD(manager, layers, optimizer, sync_every=period):
        yield Member(optimizer, manager.current_step)
    manager.shutdown()
    store.set(f"{rank} has ended", "")
    store.wait([f"{other} has ended" for other in range(workers)])  # rank 0 holds the store and the Lighthouse


REQUIREMENT = "hivemind==1.1.12"
SEARCH_S = 1.0  # for a group; with less, peers miss each other in some rounds
PATIENCE_S = 10.0  # of a peer whose group does not answer


class Rounds(logging.Handler):
    """Counts the rounds in which all peers averaged, of which hivemind tells its log alone."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.text = f"Averaged parameters with {workers} peers"
        self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += record.getMessage() == self.text


@contextlib.contextmanager
def peer(layers: Any, optimizer: Any, rank: int, workers: int, period: int, batch: int) -> Iterator[Member]:
    """A peer that averages whenever all together have trained ``period`` batches each.

    Arguments as for :func:`unconnected`.
    """
    multiprocessing.current_process().daemon = False  # hivemind has processes of its own
    import hivemind

    rounds = Rounds(workers)
    logging.getLogger("hivemind.optim.state_averager").addHandler(rounds)
    store = common_store(rank, workers)
    others = [] if rank == 0 else json.loads(store.get("peers"))
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=others, start=True)
    if rank == 0:
        store.set("peers", json.dumps([str(address) for address in dht.get_visible_maddrs()]))
    shared = hivemind.Optimizer(
        dht=dht,
        run_id="rivals",
        optimizer=optimizer,
        batch_size_per_step=batch,
        target_batch_size=period * batch * workers,
        use_local_updates=True,
        matchmaking_time=SEARCH_S,
        averaging_timeout=PATIENCE_S,
        averager_opts={"request_timeout": SEARCH_S / 2},
        tracker_opts={"min_refresh_period": 0.1, "max_refresh_period": 1.0},
        verbose=True,  # else it does not tell of its rounds
    )

    def all_say(word: str, seconds: float = 60.0) -> None:
        store.set(f"{rank} {word}", "")
        store.wait([f"{other} {word}" for other in range(workers)], timedelta(seconds=seconds))

    all_say("is there")
    yield Member(shared, lambda: rounds.number)
    store.set(f"{rank} is done", "")
    while not store.check([f"{other} is done" for other in range(workers)]):
        shared.step()  # the others may wait for this one in a round
    all_say("has ended")
    shared.shutdown()
    dht.shutdown()
