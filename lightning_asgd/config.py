# The public path of core/algorithms/config.
from lightning_asgd.core.algorithms.config import *  # noqa: F403
from lightning_asgd.core.algorithms.config import __all__ as __all__
from lightning_asgd.core.algorithms.config import __doc__ as __doc__
