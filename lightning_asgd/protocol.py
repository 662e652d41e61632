# The path by which pickles name the messages of core/protocol.
from lightning_asgd.core.protocol import *  # noqa: F403
from lightning_asgd.core.protocol import __all__ as __all__
from lightning_asgd.core.protocol import __doc__ as __doc__
