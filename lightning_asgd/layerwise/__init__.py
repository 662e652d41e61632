"""Gradients that leave layer by layer during backward."""
