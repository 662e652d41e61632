# The public path of sampling/optim.
from lightning_asgd.sampling.optim import *  # noqa: F403
from lightning_asgd.sampling.optim import __all__ as __all__
from lightning_asgd.sampling.optim import __doc__ as __doc__
