#!/bin/bash
# Train on several nodes. Run this on each of them, from the root of the clone; HEAD is the first node's address:
#
#     NODES=2 NODE_RANK=0 HEAD=10.0.0.1 PER_NODE=8 examples/multi_node/torchrun.sh
#     NODES=2 NODE_RANK=1 HEAD=10.0.0.1 PER_NODE=8 examples/multi_node/torchrun.sh
#
# torchrun numbers the processes node by node, and a mesh numbers its devices with the last axis fastest:
#
#     MESH=dp=2,tp=8     node 0: dp 0, tp 0 to 7 = ranks 0 to 7      node 1: dp 1, tp 0 to 7 = ranks 8 to 15
#
# So the axis that communicates most, tp, is the last one, with a size that divides PER_NODE: its groups stay inside of
# a node, on its fast links. Axes of data (dp) and of stages (pp), which communicate less, come first and join nodes.
# `autopar plan --model ... --devices 16 --hardware h100` tries the meshes of 16 devices and says what each would cost.
set -eu
NODES=${NODES:-1} NODE_RANK=${NODE_RANK:-0} PER_NODE=${PER_NODE:-8} HEAD=${HEAD:-localhost} PORT=${PORT:-29500}
MESH=${MESH:-dp=$NODES,tp=$PER_NODE} SCRIPT=${SCRIPT:-$(dirname "$0")/../from_scratch.py}

# With the address of the head rather than a rendezvous, ranks follow NODE_RANK, which is what the mesh above assumes.
# SIGUSR1, which SLURM sends before the time is over, is passed on: `autopar train` then saves and ends.
exec torchrun --nnodes "$NODES" --node_rank "$NODE_RANK" --nproc_per_node "$PER_NODE" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --master_addr "$HEAD" --master_port "$PORT" "$SCRIPT" "$MESH"
