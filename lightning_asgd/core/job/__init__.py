"""Starts, watches and ends the processes of a job, and says where they meet."""
