import os
import re

import pytest

from fleetx import fleet
from fleetx.fleet import job
from fleetx.fleet.job import _is_launched
from fleetx.own_gpu import own_gpu


@pytest.mark.parametrize(
    ("environment", "launched"),
    [({}, False), ({"RANK": "0", "WORLD_SIZE": "1"}, True), ({"RANK": "3", "WORLD_SIZE": "4"}, True)],
)
def test_a_launcher_says_who_a_worker_is(environment, launched):
    assert _is_launched(environment) == launched


@pytest.mark.parametrize(("rank", "workers"), [("2", "2"), ("-1", "2"), ("one", "2"), ("0", "0"), ("", "2")])
def test_a_worker_that_cannot_be_is_refused_at_once(rank, workers):
    """Else it would wait for workers that never come."""
    with pytest.raises(ValueError, match=f"RANK must be a number from 0.*got RANK='{rank}', WORLD_SIZE='{workers}'"):
        _is_launched({"RANK": rank, "WORLD_SIZE": workers})


@pytest.mark.parametrize("port", ["", "http", "-1", "65536", "1" * 50])
def test_a_port_that_cannot_be_is_refused(port):
    with pytest.raises(ValueError, match=f"MASTER_PORT must be a port from 0 to 65535.*got MASTER_PORT='{port}'"):
        _is_launched({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_what_a_launcher_says_is_refused(name):
    with pytest.raises(ValueError, match=rf"only {name}='0' is set.*launch\(\)\), or unset {name} to run alone"):
        _is_launched({name: "0"})


TASK = {"LOCAL_RANK": "1", "SLURM_LOCALID": "1", "SLURM_GPUS_PER_TASK": "1"}


@pytest.mark.parametrize(
    ("environment", "count", "gpu"),
    [
        ({}, 1, 0),
        ({"LOCAL_RANK": "1"}, 2, 1),
        ({"LOCAL_RANK": "3", "FLEETX_SHARE_GPUS": "1"}, 2, 1),
        (TASK, 1, 0),  # srun shows each task its own
    ],
)
def test_a_worker_uses_a_gpu_of_its_own(environment, count, gpu):
    assert own_gpu(environment, count) == gpu


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        ({"LOCAL_RANK": "1"}, RuntimeError, "has 1 that this one sees, too few for its worker 1 (LOCAL_RANK=1)"),
        ({"LOCAL_RANK": "1", "FLEETX_SHARE_GPUS": "0"}, RuntimeError, "or set FLEETX_SHARE_GPUS=1 if workers"),
        ({"LOCAL_RANK": "1", "FLEETX_SHARE_GPUS": "yes"}, ValueError, "FLEETX_SHARE_GPUS must be 1, .*, got 'yes'"),
        (TASK | {"SLURM_LOCALID": "0"}, RuntimeError, "each worker needs a GPU of its own"),
        ({"LOCAL_RANK": "one"}, ValueError, "LOCAL_RANK must be a worker's number on its machine, .*LOCAL_RANK='one'"),
    ],
)
def test_no_gpu_is_shared_unasked(environment, error, message):
    pattern = re.escape(message).replace(re.escape(".*"), ".*")
    with pytest.raises(error, match=pattern):
        own_gpu(environment, 1)


def test_fleet_init_refuses_to_share_a_gpu(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.delenv("FLEETX_SHARE_GPUS", raising=False)
    monkeypatch.setattr(job.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(job.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(job.torch.cuda, "set_device", lambda _number: None)
    monkeypatch.setattr(job.dist, "init_process_group", lambda _backend: pytest.fail("it has joined the others"))
    with pytest.raises(RuntimeError, match="each worker needs a GPU of its own"):
        fleet.init()
