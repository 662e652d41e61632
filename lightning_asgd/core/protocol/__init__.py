"""What crosses the wire between a worker and a server. Knows nothing of how it travels.

Shapes: a shard holds one flat tensor per group of the layout (see :mod:`lightning_asgd.core.foundation.layout`), so
every ``tuple[Tensor, ...]`` below has one entry per group, of shape ``(N_g,)`` with the group's dtype.
"""

from __future__ import annotations

import importlib

from lightning_asgd.compression import messages as link_messages
from lightning_asgd.compression.messages import *
from lightning_asgd.core.protocol import collective as collective_messages
from lightning_asgd.core.protocol import lease as lease_messages
from lightning_asgd.core.protocol import session as session_messages
from lightning_asgd.core.protocol import state as state_messages
from lightning_asgd.core.protocol import update as update_messages
from lightning_asgd.core.protocol.collective import *
from lightning_asgd.core.protocol.lease import *
from lightning_asgd.core.protocol.request import PUBLIC_PATH, Request
from lightning_asgd.core.protocol.session import *
from lightning_asgd.core.protocol.state import *
from lightning_asgd.core.protocol.update import *
from lightning_asgd.islands import messages as island_messages
from lightning_asgd.islands.messages import *
from lightning_asgd.monitor import messages as metric_messages
from lightning_asgd.monitor.messages import *
from lightning_asgd.recovery import messages as recovery_messages
from lightning_asgd.recovery.messages import *
from lightning_asgd.tables.served import messages as table_messages
from lightning_asgd.tables.served.messages import *

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
        globals()[_name].__module__ = PUBLIC_PATH

importlib.import_module(PUBLIC_PATH)  # cloudpickle takes classes of a module that is not loaded for a program's own
