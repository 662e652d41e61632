#!/bin/bash
#SBATCH --job-name=digits-servers
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2

exec lightning-asgd serve --host "$(hostname)" --port 29400 --run-id digits
