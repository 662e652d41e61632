"""A worker in any program: connection, replica, exchanges, sync points."""
