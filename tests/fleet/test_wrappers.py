"""Models that something else reduces or shards, refused before a weight is touched."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fleetx as X
from fleetx import fleet
from fleetx.fleet import wrappers

pytestmark = [
    pytest.mark.middle,  # torch.distributed.fsdp alone takes longer to import than most tests
    pytest.mark.filterwarnings("ignore:.*(FullyShardedDataParallel|FSDP).*"),
]


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp1_in_place(model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_of_a_part(model):
    model[0] = fsdp1(model[0])
    return model


def fsdp2(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def tensor_parallel(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})


WAYS = {
    "FullyShardedDataParallel": fsdp1,
    "is sharded by FullyShardedDataParallel": fsdp1_in_place,
    "the module '0' is sharded by FullyShardedDataParallel": fsdp1_of_a_part,
    "the model is sharded by fully_shard": fsdp2,
    "the parameter '0.weight' is a DTensor": tensor_parallel,
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def values(model):
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("said", WAYS)
def test_sharded_models_are_refused_by_name_and_stay_as_they_are(said, monkeypatch):
    model = WAYS[said](net())
    before = values(model)
    monkeypatch.setattr("fleetx.fleet.model.broadcast_module", lambda _model: pytest.fail("weights are written"))
    for use in (
        lambda: fleet.distributed_model(model),
        lambda: X.Step(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy),
    ):
        with pytest.raises(ValueError, match=rf"{said}.*Leave the sharding out.*fleetx\.memory\.apply"):
            use()
    assert all(map(torch.equal, values(model), before))


@pytest.mark.parametrize("shard", [fsdp1, fsdp2])
def test_a_model_that_was_sharded_after_it_was_prepared_is_named_as_such(shard):
    model = shard(fleet.distributed_model(net()))
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer.* is sharded.*Leave the sharding out"):
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_wrapper_that_keeps_the_parameters_is_found_when_training_begins():
    model = fleet.distributed_model(net())
    wrapper = fsdp1_in_place(model)
    with pytest.raises(ValueError, match=r"also wrapped in FullyShardedDataParallel.*Leave that wrapper out"):
        wrappers.require_alone(list(model.parameters()))
    del wrapper
