"""What belongs to a running worker, and is not copied with the Trainer, callbacks or data that refer to it."""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T")


class Live:
    """Base of objects that ``copy.deepcopy`` returns as they are: a copied Trainer is not another worker."""

    def __deepcopy__(self: _T, memo: Any) -> _T:
        return self
