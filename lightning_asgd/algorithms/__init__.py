"""The update rules: pure tensor functions without network, threads, clock or Lightning."""

from lightning_asgd.algorithms.asgd import ASGD, parse_scale

__all__ = ["ASGD", "parse_scale"]
