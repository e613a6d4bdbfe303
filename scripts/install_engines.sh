#!/bin/sh
# Install the launchers and schedulers that tests/jobs starts jobs with, on Debian 12 or Ubuntu, as root:
#
#     make .venv/.trainers && sh scripts/install_engines.sh
#
# `make test` needs none of them. Where one is missing its tests are skipped, and say so. No daemon is needed: the tests
# start their own, in namespaces of their own.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}

packages="slurmctld slurmd slurm-client" # two machines under SLURM (tests/jobs/slurm_cluster.py)
packages="$packages munge"               # by which SLURM's daemons know each other
packages="$packages openmpi-bin"         # mpirun
packages="$packages iproute2 util-linux" # ip, unshare and nsenter: networks that stand for machines

export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet
# shellcheck disable=SC2086
apt-get install --quiet --yes --no-install-recommends $packages
"$VENV/bin/pip" install --quiet --requirement requirements/engines.txt # Ray, and the models of Kubernetes' resources
