"""Counts the bytes that leave each machine for an all-reduce, flat and in a hierarchy; saves them."""

import json
import sys
from pathlib import Path

import torch

from fleetx import fleet
from fleetx.comm.groups import GroupSettings
from fleetx.comm.reducer import Reducer, ReducerSettings

WAYS = {"flat": GroupSettings(), "hierarchy": GroupSettings(hierarchical=True)}
NUMBERS = 2**20  # of fp32
WINDOWS = 3


def sent():
    """The bytes that this machine has sent so far."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[8])


def crossing(groups):
    """How often the gradients' size was sent, by this machine for each window."""
    parameter = torch.nn.Parameter(torch.zeros(NUMBERS))
    reducer = Reducer([parameter], 0, ReducerSettings(groups=groups))
    fleet.barrier_worker()
    before = sent()
    fleet.barrier_worker()
    for _ in range(WINDOWS):
        parameter.grad = None
        with reducer.overlapping(()):
            (parameter * (fleet.worker_index() + 1)).sum().backward()
        reducer.finish()
        assert parameter.grad.unique().tolist() == [10.0]
    fleet.barrier_worker()
    times = (sent() - before) / (4 * NUMBERS * WINDOWS)
    fleet.barrier_worker()
    return times


def main():
    fleet.init()
    found = {way: crossing(groups) for way, groups in WAYS.items()}
    (Path(sys.argv[1]) / f"{fleet.worker_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
