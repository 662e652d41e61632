#!/bin/bash
#SBATCH --job-name=digits-servers
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2

# The name must stand for an address that the other nodes reach: give that instead where it stands for the loopback.
exec lightning-asgd serve --host "$(hostname)" --port 29400 --run-id digits
