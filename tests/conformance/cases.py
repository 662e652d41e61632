"""All cases, in the order of the page."""

from tests.conformance import callbacks, libraries, metrics, modules, optimization  # noqa: F401 - they fill CASES
from tests.conformance.case import CASES

__all__ = ["CASES"]
