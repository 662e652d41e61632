#!/bin/bash
#SBATCH --job-name=digits-servers
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2

# The host name must resolve to an address that the other nodes can reach. If it resolves to loopback, give the address.
exec lightning-asgd serve "$(hostname):29400/digits"
