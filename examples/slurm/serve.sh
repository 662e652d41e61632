#!/bin/bash
#SBATCH --job-name=digits-servers
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2

exec lightning-asgd serve --host "$(hostname -I | cut -d' ' -f1)" --port 29400 --run-id digits
