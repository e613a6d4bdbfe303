import os
import re
import socket

import pytest
import torch
import torch.distributed as dist

from fleetx import fleet
from fleetx.comm import stopping
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


@pytest.fixture
def launched_alone(monkeypatch):
    """What a launcher says to an only worker; no group is left behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    yield
    fleet.shutdown()


def test_after_other_code_has_ended_the_group_init_joins_again(launched_alone):
    """A trainer may end any group that is up when its function returns, and run the next one in the same process."""
    fleet.init()
    dist.destroy_process_group()
    fleet.init()
    assert dist.is_initialized()


def test_shutdown_leaves_a_group_alone_that_came_after_its_own(launched_alone):
    fleet.init()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    fleet.init()
    fleet.shutdown()
    assert dist.is_initialized()
    dist.destroy_process_group()


@pytest.fixture
def asked(monkeypatch):
    """Ask for a stop without a signal, and forget it afterwards."""
    monkeypatch.setattr(stopping, "_state", stopping._State())
    monkeypatch.setattr(stopping, "_handle_signals", lambda: None)
    return fleet.request_stop


def test_what_one_job_was_asked_and_has_answered_does_not_concern_the_next_one(launched_alone, asked):
    fleet.init()
    asked()
    fleet.init()  # again, in the same job
    assert fleet.stop_requested()
    assert fleet.stop_requested()
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    fleet.init()
    assert not fleet.stop_requested()
    asked()
    fleet.init()
    assert fleet.stop_requested()
    dist.destroy_process_group()


def test_a_request_that_was_not_answered_waits_for_the_job(launched_alone, asked):
    asked()
    fleet.init()
    assert fleet.stop_requested()


def test_a_script_that_trains_alone_twice_is_asked_twice(asked):
    asked()
    fleet.init()
    assert fleet.stop_requested()
    fleet.init()
    assert not fleet.stop_requested()


def test_the_votes_of_an_earlier_job_are_forgotten(launched_alone, asked):
    fleet.init()
    stopping.listen()
    stopping.note(torch.ones(()))
    assert stopping.is_agreed()
    dist.destroy_process_group()
    fleet.init()
    assert not stopping.is_agreed()
