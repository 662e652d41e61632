"""Worker side: talking to the servers, and the exchange that hides behind compute."""
