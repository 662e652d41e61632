# The public path of core/foundation/errors.
from lightning_asgd.core.foundation.errors import *  # noqa: F403
from lightning_asgd.core.foundation.errors import __all__ as __all__
from lightning_asgd.core.foundation.errors import __doc__ as __doc__
