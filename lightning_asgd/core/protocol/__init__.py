"""What crosses the wire between a worker and a server. Knows nothing of how it travels.

Shapes: a shard holds one flat tensor per group of the layout (see :mod:`lightning_asgd.core.foundation.layout`), so
every ``tuple[Tensor, ...]`` below has one entry per group, of shape ``(N_g,)`` with the group's dtype.
"""

from __future__ import annotations

import importlib

from lightning_asgd.core.protocol import collective, lease, session, update
from lightning_asgd.core.protocol.collective import *
from lightning_asgd.core.protocol.lease import *
from lightning_asgd.core.protocol.request import PUBLIC_PATH, Request, publish_path
from lightning_asgd.core.protocol.session import *
from lightning_asgd.core.protocol.update import *

__all__ = ["Request"]
__all__ += collective.__all__
__all__ += lease.__all__
__all__ += session.__all__
__all__ += update.__all__

publish_path(globals())
importlib.import_module(PUBLIC_PATH)  # cloudpickle takes classes of a module that is not loaded for a program's own
