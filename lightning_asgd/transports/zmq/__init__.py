"""Messages over ZeroMQ, encrypted."""
