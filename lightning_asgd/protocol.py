"""The path by which pickles name all messages: those of :mod:`lightning_asgd.core.protocol`, and of features."""

from typing import Any

from lightning_asgd.core.protocol import *  # noqa: F403
from lightning_asgd.core.protocol import __all__ as __all__
from lightning_asgd.features import sendable


def __getattr__(name: str) -> Any:
    found = sendable(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
