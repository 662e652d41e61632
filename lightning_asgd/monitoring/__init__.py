"""What the workers have done, as numbers: measured, shared, written down. Knows no Lightning."""
