"""A worker's part in any training loop: the job or run that it belongs to, and the object of a plain loop."""
