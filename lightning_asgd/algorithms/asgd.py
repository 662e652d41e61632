# The public path of core/algorithms/asgd.
from lightning_asgd.core.algorithms.asgd import *  # noqa: F403
from lightning_asgd.core.algorithms.asgd import __all__ as __all__
from lightning_asgd.core.algorithms.asgd import __doc__ as __doc__
