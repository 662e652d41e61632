"""Errors, settings, the layout of tensors on servers, process names, numerics."""
