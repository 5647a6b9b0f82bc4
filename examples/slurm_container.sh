#!/bin/bash
# Train on several nodes of a Slurm cluster, inside a container (needs Slurm's pyxis plugin).
#
# Command:  bash examples/slurm_container.sh IMAGE NODES [FLAG ...]
#           IMAGE: built by `docker build -t maxmeg .` and pushed to a registry, or a .sqsh file
# Time:     the job asks for 24 hours, saves before its end, and is requeued until it is finished
# Result:   maxmeg-JOB.log with the step lines, logs/maxmeg-JOB/ with a log per process
set -euo pipefail
image=$1 nodes=$2
shift 2

# Does the plan fit? It needs no GPU.
maxmeg plan --config=llama3-8b --hardware="h100x$((8 * nodes))" --parallel.tensor=2 --data.mock=true
# The job first measures every GPU and the network (maxmeg doctor), and stops if one is slow.
script=$(maxmeg launch slurm.sbatch)
variables="ALL,MAXMEG_CONTAINER=$image,MAXMEG_MOUNTS=/shared:/shared,MAXMEG_DOCTOR=1"
sbatch --nodes="$nodes" --export="$variables" "$script" --config=llama3-8b \
  --parallel.tensor=2 --data.mock=true --run_dir=/shared/runs/llama3-8b "$@"
