"""A run's servers and workers, as its driver sees them."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from lightning_asgd.errors import LaunchError

__all__ = ["RunServer", "RunWorker"]


class RunWorker:
    """A worker of the run, as the driver sees it."""

    def __init__(self, number: int, actor: Any, ended: Any) -> None:
        self.number, self.actor, self.ended = number, actor, ended
        self.stop_at: float | None = None  # when it is killed, of one that was asked to stop


class RunServer:
    """A server of the run, as the driver sees it."""

    def __init__(self, actor: Any) -> None:
        self.actor, self._checked = actor, actor.check.remote()

    def check(self) -> None:
        """Raise a :class:`LaunchError` if it is lost for good. It may not answer now: Ray may be restarting it."""
        if not ray.wait([self._checked], timeout=0)[0]:
            return
        try:
            ray.get(self._checked)
        except RayTaskError as error:
            raise LaunchError(str(error.cause)) from error
        except RayActorError as error:
            raise LaunchError(f"A server cannot be started again: {error}") from error
        self._checked = self.actor.check.remote()
