"""What starts, restarts and places workers for us: torchrun, SLURM, tasks of Ray."""
