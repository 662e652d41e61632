# The public path of plan/timing.
from lightning_asgd.plan.timing import *  # noqa: F403
from lightning_asgd.plan.timing import __all__ as __all__
from lightning_asgd.plan.timing import __doc__ as __doc__
