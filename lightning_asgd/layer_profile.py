# The public path of plan/layer_profile.
from lightning_asgd.plan.layer_profile import *  # noqa: F403
from lightning_asgd.plan.layer_profile import __all__ as __all__
from lightning_asgd.plan.layer_profile import __doc__ as __doc__
