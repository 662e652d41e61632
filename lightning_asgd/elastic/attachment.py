"""A worker of an elastic run: what it learns when it joins, which worker is chief, when the run ends.

To Lightning it is a Trainer with a single device, whose epochs get shorter the more workers there are. Workers do
nothing together: the data are leased, and every worker takes the servers' weights at the end of its epoch. What a
worker publishes for the others, and for workers that join later, the coordinator keeps (:class:`RunMetadata`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_asgd.core.leases.sampler import digest
from lightning_asgd.core.protocol import BOOTSTRAPPED, FIRST_ORDER
from lightning_asgd.core.worker.session_client import SessionClient

_LOOP = "loop"  # what kind of loop began the run
_LAYOUT = "layout"  # what is exchanged
_CONSTANTS = "constants"  # the frozen parameters, and buffers that are not persistent
_BUFFERS = "buffers"  # the chief's persistent ones, as of its latest sync point
_PROGRESS = "progress"  # the chief's progress at the end of its latest epoch
_BATCH = "batch"  # samples of a batch, as progress counts them
_FILES = "files"  # state of the chief's checkpoint callbacks
_STOPS = "stops"  # how often a chief has stopped training early

_ASK_AGAIN_S = 0.1


class Attachment:
    """One worker's part in a run. ``on_chief`` is called when this worker becomes chief, or is replaced as chief."""

    def __init__(self, client: SessionClient, on_chief: Callable[[bool], None] = lambda _: None) -> None:
        self.client = client
        self._on_chief = on_chief
        self.chief = False
        """Whether this worker logs and writes checkpoints; changes between two batches and at sync points only."""
        self._heard = 0  # according to the latest heartbeat reply
        self._notes: Mapping[str, Any] = {}
        self.bootstraps = False
        """Whether the run had no weights when this worker joined."""
        self.processes: Mapping[int, str] = {}
        """The processes of the workers that took part before, by name."""

    def arrive(self, device: Any) -> int:
        """Attach a worker that trains on ``device``; waits for first weights. Returns the number of earlier events."""
        attached = self.client.attach(f"{socket.gethostname()}, process {os.getpid()}, {device}")
        self._notes, self.bootstraps, self.processes = attached.notes, attached.bootstraps, attached.processes
        self.note_chief(attached.chief)
        self.update()
        return attached.heard

    def note_chief(self, chief: int) -> None:
        """Note which worker is chief. Any thread may call this."""
        self._heard = chief

    @property
    def outdated(self) -> bool:
        """Whether :meth:`update` would change anything."""
        return self.chief is not (self._heard == self.client.connection.worker)

    def update(self) -> None:
        """Apply a change of chief, between two batches and at sync points."""
        if self.outdated:
            self.chief = not self.chief
            self._on_chief(self.chief)

    @property
    def loop(self) -> str | None:
        """What kind of loop began the run; None for the bootstrap worker."""
        return self._notes.get(_LOOP)

    @property
    def layout(self) -> Any:
        """Description of the run's layout; None for the bootstrap worker."""
        return self._notes.get(_LAYOUT)

    @property
    def progress(self) -> dict[str, Any] | None:
        """The run's progress when this worker joined; None in its first epoch."""
        return self._notes.get(_PROGRESS)

    @property
    def between_epochs(self) -> bool:
        """Whether that was the end of an epoch."""
        return bool((self.progress or {}).get("between_epochs"))

    def publish(
        self, layout: Any, constants: Mapping[str, Tensor], progress: dict[str, Any] | None, loop: str = ""
    ) -> None:
        """Publish the layout and what is not exchanged, once the servers have weights: others may join."""
        self.client.note(_LOOP, loop)
        if progress is not None:
            self.client.note(_PROGRESS, progress)
        self.client.note(_LAYOUT, layout)
        self.client.note(_CONSTANTS, {name: tensor.detach().cpu() for name, tensor in constants.items()})
        self.client.note(BOOTSTRAPPED, True)

    def adopt(self, constants: Mapping[str, Tensor]) -> None:
        """Take the bootstrap worker's values of constants, in place; a buffer of another shape keeps its own."""
        theirs = self._notes.get(_CONSTANTS, {})
        for name, tensor in constants.items():
            if name in theirs and (isinstance(tensor, Parameter) or tensor.shape == theirs[name].shape):
                tensor.detach().copy_(theirs[name])

    def publish_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Publish the chief's persistent buffers."""
        self.client.note(_BUFFERS, values)

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """Those that the chief published last."""
        return self.client.note(_BUFFERS) or {}

    def reference_batch(self, mine: int) -> int:
        """The reference batch size: that of the run's first worker."""
        return int(self.client.note(_BATCH, mine, first=True))

    def first_order(self, epoch: str, mine: list[Any]) -> list[Any]:
        """The order of samples of the worker that opens an epoch first; ``mine`` itself if it is the same."""
        client, own = self.client, (self.client.connection.worker, digest(mine))
        opener, first = client.note(f"{FIRST_ORDER}{epoch}", own, first=True)
        if opener == own[0]:
            client.publish_order(epoch, mine)
        if first == own[1]:
            return mine
        while (theirs := client.published_order(epoch)) is None and opener in client.heard.living:
            time.sleep(_ASK_AGAIN_S)
        return theirs or mine

    def publish_checkpoints(self, files: Any) -> None:
        """Publish the state of the chief's checkpoint callbacks, after it has written a file."""
        self.client.note(_FILES, files)

    @property
    def files(self) -> Any:
        """That state as the latest chief published it; None if there is no file."""
        return self.client.note(_FILES)

    def end_epoch(self, progress: Callable[[], dict[str, Any]], should_stop: bool) -> bool:
        """Publish or read the end of an epoch. Returns whether training ends with it.

        The run ends where the chief does, and others may leave it; those that attach later get the chief's progress.
        """
        self.update()
        if self.chief:
            self.client.note(_PROGRESS, progress())
        stops = self.client.note(_STOPS) or 0
        if self.chief and should_stop:
            self.client.note(_STOPS, stops + 1)
        return should_stop or stops > (self._notes.get(_STOPS) or 0)
