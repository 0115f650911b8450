#!/bin/bash
# Train on several nodes of a SLURM cluster, submitted from the root of the clone; checkpoints go to a folder that all
# nodes see, and a job that is submitted again goes on from the newest one:
#
#     sbatch examples/multi_node/slurm.sh
#
#SBATCH --job-name=autopar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@120
set -eu
export NODES=$SLURM_NNODES PER_NODE=${PER_NODE:-8}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD MESH=${MESH:-dp=$NODES,tp=$PER_NODE}

# One task a node: its torchrun starts that node's processes. torchrun.sh says how the mesh lies over the nodes.
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec examples/multi_node/torchrun.sh'
