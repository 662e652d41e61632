"""Which worker trains which units of an epoch, on the server and on the workers."""
