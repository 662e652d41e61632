"""One port for a job: the gateway."""
