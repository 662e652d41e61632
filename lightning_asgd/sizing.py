# The public path of plan/sizing.
from lightning_asgd.plan.sizing import *  # noqa: F403
from lightning_asgd.plan.sizing import __all__ as __all__
from lightning_asgd.plan.sizing import __doc__ as __doc__
