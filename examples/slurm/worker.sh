#!/bin/bash
#SBATCH --job-name=digits-worker
#SBATCH --array=1-8
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@60

exec srun python examples/spot_worker.py --run "$SERVER:29400/digits"
