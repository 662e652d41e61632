"""A case of the battery: what is run under DDP and under A-SGD, and what is expected of the comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["CASES", "Case", "case"]


@dataclass(frozen=True)
class Case:
    """One Lightning feature.

    Attributes:
        group: heading on the page.
        title: the feature.
        run: runs on every rank and returns facts to compare; ``"loss"`` is compared with a margin, all others exactly.
        note: what differs and why, or what to know; obligatory where something differs or is refused.
        differs: facts that are not those of DDP.
        refused: pattern of the error that A-SGD raises.
        ddp_fails: DDP itself raises an error.
        ddp: whether there is anything to compare with.
        since: the first release of Lightning that is known to have it.
        ddp_since: the first release of torch whose DDP is known to train it.
    """

    group: str
    title: str
    run: Callable[[Any], Any]
    note: str = ""
    differs: tuple[str, ...] = ()
    refused: str = ""
    ddp_fails: bool = False
    ddp: bool = True
    since: str = "2.5.0"
    ddp_since: str = "2.6.0"

    def __post_init__(self) -> None:
        assert self.note or not (self.differs or self.refused), self.title

    @property
    def name(self) -> str:
        """For test names."""
        return self.run.__name__

    @property
    def status(self) -> str:
        """For the page."""
        return "refused" if self.refused else "differs" if self.differs else "works"


CASES: dict[str, Case] = {}


def case(group: str, title: str, **expected: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Make a function a case; see :class:`Case`."""

    def register(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        assert run.__name__ not in CASES, run.__name__
        CASES[run.__name__] = Case(group, title, run, **expected)
        return run

    return register
