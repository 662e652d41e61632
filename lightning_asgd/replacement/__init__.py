"""Workers that are replaced, another chief, and the last checkpoint."""
