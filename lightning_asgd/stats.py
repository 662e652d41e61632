# The public path of core/foundation/stats.
from lightning_asgd.core.foundation.stats import *  # noqa: F403
from lightning_asgd.core.foundation.stats import __all__ as __all__
from lightning_asgd.core.foundation.stats import __doc__ as __doc__
