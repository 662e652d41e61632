# The public path of plan/mini_batch.
from lightning_asgd.plan.mini_batch import *  # noqa: F403
from lightning_asgd.plan.mini_batch import __all__ as __all__
from lightning_asgd.plan.mini_batch import __doc__ as __doc__
