"""One fit of one process of an island: what :class:`FitSession` does, together with the island's other processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_asgd.core.foundation.errors import ConfigurationError
from lightning_asgd.core.lightning import private_names
from lightning_asgd.core.lightning.checkpointing import KEY, entry_of, left_in
from lightning_asgd.core.lightning.fit_session import FitSession
from lightning_asgd.core.lightning.joint_decisions import Sigterm
from lightning_asgd.core.protocol import JointReport, SyncReport
from lightning_asgd.core.worker.collectives import Phase
from lightning_asgd.core.worker.setup import Start
from lightning_asgd.core.worker.synchronizer import Synchronizer
from lightning_asgd.islands.fleet import IslandFleet
from lightning_asgd.islands.group import IslandGroup
from lightning_asgd.islands.leases import IslandLeases, SharedLeases
from lightning_asgd.islands.synchronizer import set_up_island
from lightning_asgd.tables.served.clients import served


class IslandSession(FitSession):
    """See :class:`FitSession`; ``place`` is this process's place among those that share a batch, and their number."""

    membership: IslandFleet
    _kind_of_leases = SharedLeases
    sigterm: Sigterm
    """Whether this process has got SIGTERM; set by the strategy."""

    def __init__(self, group: IslandGroup, place: tuple[int, int], trainer: Any, *about: Any) -> None:
        self._group, self._place, self._stops_later = group, place, False
        group.on("reset non-finite state", super()._reset_nonfinite_state)
        if served(trainer.lightning_module):
            raise ConfigurationError(
                f"island={trainer.strategy.options.island!r} was given, but the module has a ServedEmbedding. Expected "
                "workers of one process each, or an Embedding(sparse=True)."
            )
        super().__init__(trainer, *about, split=False)

    def _leases_of_loop(self, leases: Any) -> IslandLeases:
        return IslandLeases(self._group, leases, self._place)

    def _enter(self, start: Start) -> Synchronizer:
        membership = self.membership
        about = self._group, self._module, membership.sender, membership.client
        return set_up_island(*about, self.config, self._training, start)

    @property
    def _peers(self) -> int:
        return self.workers  # the same at all processes, whose steps have to be equally long

    def _summed(self, values: Tensor) -> Tensor:
        return self._group.sum(values)

    def _meet(self, name: str, mine: SyncReport, *, all_have_pushed: bool) -> JointReport:
        if self._any_has_sigterm():
            self.sigterm.end_fit()
        meet, mine = super()._meet, replace(mine, should_stop=self.any_stops(mine.should_stop))
        return self._group.share(lambda: meet(name, mine, all_have_pushed=all_have_pushed))

    def end_batch(self) -> None:
        """Adopt a stop or SIGTERM of all processes, or of any after the batch before.

        Raises a ``RuntimeError`` unless all have taken as many steps.
        """
        super().end_batch()
        steps = self.synchronizer.stats.steps
        trainer, wishes = self.trainer, self.trainer.should_stop or self._stops_later
        stops, ends = self._group.end_batch(wishes, self.sigterm.came, steps)
        # What only some wish counts for the next batch, as all have to stop together.
        self._stops_later, trainer.should_stop = trainer.should_stop and not stops, stops
        if ends:
            self.sigterm.end_fit()

    def _agree_to_stop(self) -> None:
        super()._agree_to_stop()
        if self._any_has_sigterm():  # since Lightning has looked; there may be no further batch
            raise private_names.sigterm.imported(self.trainer.strategy.tree)

    def _any_has_sigterm(self) -> bool:
        return self._group.any(self.sigterm.came)

    def any_stops(self, should_stop: bool) -> bool:
        """Whether any process of the island is to stop."""
        return self._group.any(should_stop or self._stops_later)

    @property
    def _writes_files(self) -> bool:
        return self.membership.writes()

    def _reset_nonfinite_state(self) -> None:
        self._group.order("reset non-finite state")  # every process has a part of the optimizers' state, or a copy

    def _note_losses(self) -> None:
        if self._group.leads:
            super()._note_losses()

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """Add what a fit needs to resume, with the island's own steps. All of its processes call it together."""
        if checkpoint is not self.whole:
            return
        self.whole, held = None, None
        left = self._group.share(lambda: left_in(checkpoint))  # a program may differ between processes
        if self._collectives.phase is Phase.ASYNC:
            epoch, done = self.synchronizer.caught_up
            held = epoch, done or ()
        servers = self.synchronizer.state() if "optimizer_states" in left else []
        entry = entry_of(self.synchronizer.versions, self.config.algorithm_name, servers, {}, left)
        if "loops" in left:
            self.data.save(entry, held)
        if "loops" in left_in(checkpoint):
            self.data.to_ddp_counters(checkpoint["loops"]["fit_loop"])
        checkpoint[KEY] = entry
