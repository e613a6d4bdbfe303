#!/bin/sh
# One machine:  sh examples/clusters/mpirun/train.sh
# Several:      HOSTS=gpu01:4,gpu02:4 WORKERS=8 MASTER_ADDR=gpu01 sh examples/clusters/mpirun/train.sh
exec mpirun -n "${WORKERS:-2}" ${HOSTS:+-host "$HOSTS"} ${MASTER_ADDR:+-x MASTER_ADDR} ${OMP_NUM_THREADS:+-x OMP_NUM_THREADS} \
    --bind-to none python examples/clusters/train.py
