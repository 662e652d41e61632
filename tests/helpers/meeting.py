"""How the processes of torch's default process group have met, as one of them sees it."""

from __future__ import annotations

from typing import Any

import psutil
import torch.distributed as dist


def how_it_met() -> dict[str, Any]:
    """The kind of the group's store, and the addresses at which this process listens."""
    store: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    listening = [each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return {"store": type(store).__name__, "listens": sorted({each.laddr.ip for each in listening})}
