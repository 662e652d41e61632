"""Whether training waits for its data: measured, logged while a fit runs, and shortened by samples kept in memory."""
