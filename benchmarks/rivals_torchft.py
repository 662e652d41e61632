"""torchft's local SGD in a plain loop, over gloo.

torchft keeps a synchronous job alive when groups of GPUs fail. Each rank is such a group. Before every exchange they
agree through the Lighthouse on who takes part, and after it on whether the mean is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rivals import Member, common_store

__all__ = ["REQUIREMENT", "replica_group"]

REQUIREMENT = "torchft==0.2.0"


@contextlib.contextmanager
def replica_group(layers: Any, optimizer: Any, rank: int, workers: int, period: int, batch: int) -> Iterator[Member]:
    """A group of one rank; rank 0 runs the Lighthouse as well. Arguments as for :func:`rivals.unconnected`."""
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
