#!/bin/sh
# One machine:      sh examples/clusters/torchrun/train.sh
# On each of two:   MASTER=10.0.0.1:29500 NODES=2 sh examples/clusters/torchrun/train.sh
# With c10d, the machines may come in any order; the one that MASTER names keeps the store.
exec torchrun --nnodes "${NODES:-1}" --nproc_per_node "${WORKERS:-2}" --rdzv_backend c10d \
    --rdzv_endpoint "${MASTER:-localhost:0}" --rdzv_id "${JOB:-train}" examples/clusters/train.py
