"""What crosses the wire between a worker and a server. Knows nothing of how it travels.

Shapes: a shard holds one flat tensor per group of the layout (see :mod:`lightning_asgd.layout`), so every
``tuple[Tensor, ...]`` below has one entry per group, of shape ``(N_g,)`` with the group's dtype.
"""

from __future__ import annotations

from lightning_asgd.protocol import (
    collective_messages,
    island_messages,
    lease_messages,
    link_messages,
    metric_messages,
    recovery_messages,
    session_messages,
    state_messages,
    table_messages,
    update_messages,
)
from lightning_asgd.protocol.collective_messages import *
from lightning_asgd.protocol.island_messages import *
from lightning_asgd.protocol.lease_messages import *
from lightning_asgd.protocol.link_messages import *
from lightning_asgd.protocol.metric_messages import *
from lightning_asgd.protocol.recovery_messages import *
from lightning_asgd.protocol.request import Request
from lightning_asgd.protocol.session_messages import *
from lightning_asgd.protocol.state_messages import *
from lightning_asgd.protocol.table_messages import *
from lightning_asgd.protocol.update_messages import *

__all__ = ["Request"]
__all__ += collective_messages.__all__
__all__ += island_messages.__all__
__all__ += lease_messages.__all__
__all__ += link_messages.__all__
__all__ += metric_messages.__all__
__all__ += recovery_messages.__all__
__all__ += session_messages.__all__
__all__ += state_messages.__all__
__all__ += table_messages.__all__
__all__ += update_messages.__all__

for _name in __all__:
    if isinstance(globals()[_name], type):
        # RPC unpickles a message before any code compares PROTOCOL: one path for all, so that no moved class hides it.
        globals()[_name].__module__ = __name__
