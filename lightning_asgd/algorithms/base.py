# The public path of core/algorithms/base.
from lightning_asgd.core.algorithms.base import *  # noqa: F403
from lightning_asgd.core.algorithms.base import __all__ as __all__
from lightning_asgd.core.algorithms.base import __doc__ as __doc__
