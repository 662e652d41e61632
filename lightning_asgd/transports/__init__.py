"""The two transports."""
