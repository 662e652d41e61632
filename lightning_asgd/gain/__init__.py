"""Longer steps for optimizers whose steps do not grow with their gradients, so that N workers train as DDP does.

DDP's one Adam divides by the size of the mean gradient of N workers. Each worker's own divides by that of its gradient,
which has N times the noise variance, so its steps are too short. A worker estimates the factor from the states of its
optimizer (``estimate.py``), and its optimizer takes longer steps (``steps.py``). Nothing is sent. The same holds for
Muon and Lion, whose steps have one size.
"""

from lightning_asgd.gain.estimate import Signal
from lightning_asgd.gain.steps import Gain

__all__ = ["Gain", "Signal"]
