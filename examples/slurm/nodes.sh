#!/bin/bash
#SBATCH --job-name=digits-workers
#SBATCH --nodes=1-4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@60
#SBATCH --no-kill

srun --kill-on-bad-exit=0 --wait=0 python examples/spot_worker.py --run "$SERVER:29400/digits"
