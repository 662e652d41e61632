"""Longer steps for optimizers whose steps do not grow with their gradients, so that N workers train as DDP does.

DDP's one Adam divides by the size of the mean gradient of N workers. Each worker's own divides by that of its gradient,
which has N times the noise variance, so its steps are too short; the same holds for RMSprop and others. The mean of N
steps of Muon or Lion, which have one size, is too short. A worker estimates the factor (``estimate.py``), and its
optimizer takes longer steps (``steps.py``). Nothing is sent.
"""

from lightning_asgd.gain.steps import Gain

__all__ = ["Gain"]
