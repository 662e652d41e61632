"""Where the time of a training step goes that is not spent on training: data stalls, after Mohan et al. (2021).

A *prep stall* is time that the device waits for samples to be prepared (decoded, augmented, collated, copied to it), a
*fetch stall* time that it waits for them to come from storage, a *sync stall* time that it waits for an exchange.
:mod:`lightning_asgd.data_stalls.probe` measures them; this file has the arithmetic.

References:
    Mohan, Phanishayee, Raniwala, Chidambaram, "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 14(5), 2021,
    arXiv:2007.06775: the differential technique (DS-Analyzer) and its what-if analysis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Stalls"]


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """What was measured, in seconds per step.

    Args:
        batch_size: samples per step.
        processes: of the data loader; 0 where the training process loads.
        synthetic_s: a step on a batch that is on the device.
        cached_s: a step on samples that are in memory and are prepared again.
        cold_s: a step on samples that come from storage.
        prep_s: the loader's time for a batch that is in memory, without training.
        load_s: what it takes for a batch that comes from storage.
        sync_s: what a step waits for exchanges.
    """

    batch_size: int
    processes: int
    synthetic_s: float
    cached_s: float
    cold_s: float
    prep_s: float
    load_s: float
    sync_s: float = 0.0

    @property
    def prep_stall_s(self) -> float:
        """Seconds per step that preparing costs: with everything in memory, less than with a batch on the device."""
        return max(0.0, min(self.cached_s, self.cold_s) - self.synthetic_s)

    @property
    def fetch_stall_s(self) -> float:
        """Seconds per step that storage costs."""
        return max(0.0, self.cold_s - max(self.cached_s, self.synthetic_s))

    @property
    def step_s(self) -> float:
        """Seconds of a step, stalls included."""
        return self.cold_s + self.sync_s

    @property
    def device_rate(self) -> float:
        """Samples per second that the device can take in."""
        return self.batch_size / self.synthetic_s

    @property
    def prep_rate(self) -> float:
        """Samples per second that the loader can prepare, if they are in memory."""
        return _rate(self.batch_size, self.prep_s)

    @property
    def fetch_rate(self) -> float:
        """Samples per second that come from storage, preparing not counted; infinity if that takes no time."""
        return _rate(self.batch_size, self.load_s - self.prep_s)

    @property
    def bound(self) -> float:
        """Samples per second at most: the smallest of the three rates, reached if all three worked side by side."""
        return min(self.device_rate, self.prep_rate, self.fetch_rate)

    def predicted_step_s(self, *, processes: int | None = None, cached: float = 0.0, storage: float = 1.0) -> float:
        """Seconds of a step if something were changed.

        A process of PyTorch's loader fetches a batch and then prepares it, so the times of the two add up; with
        processes the device trains meanwhile. More of them prepare more at a time, as long as there are cores for
        them; storage does not become faster by that.

        Args:
            processes: of the loader; None for as many as there were.
            cached: share of the samples that are read from memory.
            storage: how many times as fast as it was.
        """
        processes = self.processes if processes is None else processes
        prep_s = self.prep_s * max(1, self.processes) / max(1, processes)
        fetch_s = max(0.0, self.load_s - self.prep_s) * (1 - cached) / storage
        loaded_s = prep_s + fetch_s
        return self.sync_s + (max(self.synthetic_s, loaded_s) if processes else self.synthetic_s + loaded_s)


def _rate(samples: int, seconds: float) -> float:
    return samples / seconds if seconds > 0 else math.inf
