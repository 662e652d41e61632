"""Hogwild: weights in shared memory."""
