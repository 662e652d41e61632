"""Tables that lie on the servers, in files."""
