"""`distributed_model`, `distributed_optimizer` and `init`: what they accept, and how they say no."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fleetx import fleet, notices
from tests import plain


@pytest.fixture
def said(caplog, monkeypatch):
    """What is told once, told again in this test."""
    monkeypatch.setattr(notices, "_told", set())
    caplog.set_level(logging.INFO, logger="fleetx")
    return caplog


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def prepared(strategy=None, net=None):
    return fleet.distributed_model(net or plain.make_net(), strategy)


def test_the_model_stays_itself():
    net = plain.make_net()
    keys = list(net.state_dict())
    assert fleet.distributed_model(net) is net
    assert list(net.state_dict()) == keys


def test_batch_norms_of_one_worker_stay_as_they_are(said):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    strategy = fleet.DistributedStrategy(sync_batch_norm=True)
    prepared(strategy, net)
    assert type(net[1]) is nn.BatchNorm1d
    assert not said.text
    assert "sync_batch_norm" in str(strategy)


def test_a_strategy_in_use_is_frozen():
    strategy = fleet.DistributedStrategy()
    prepared(strategy)
    with pytest.raises(TypeError, match=r"in use by fleet.distributed_model.*strategy.copy\(\)"):
        strategy.amp = True


def test_lars_and_lamb_take_the_wrapped_ones_place_and_share_its_groups():
    for name, inner in (
        ("lars", sgd),
        ("lamb", lambda net: torch.optim.AdamW(net.parameters(), lr=0.3)),
    ):
        strategy = fleet.DistributedStrategy(**{name: True})
        net = prepared(strategy)
        wrapped = inner(net)
        optimizer = fleet.distributed_optimizer(wrapped, strategy)
        assert type(optimizer.inner).__name__.lower() == name
        assert optimizer.param_groups[0] is wrapped.param_groups[0]
        wrapped.param_groups[0]["lr"] = 7.0
        assert optimizer.engine.updater.lr == 7.0


def test_the_overview_counts_what_was_excluded():
    strategy = fleet.DistributedStrategy(
        lars=True, lars_configs={"exclude_from_weight_decay": ["layer_norm", ".b_0", "batch_norm"]}
    )
    optimizer = fleet.distributed_optimizer(sgd(prepared(strategy)), strategy)
    text = optimizer.overview()
    assert "lars=True <-> lars_configs" in text
    taken = [line.split()[:2] for line in text.splitlines() if line.startswith("  ")]
    assert taken == [["pattern", "parameters"], ["layer_norm", "2"], [".b_0", "4"], ["batch_norm", "0"]]


@pytest.mark.parametrize(
    ("settings", "inner", "message"),
    [
        ({"lars": True}, lambda n: torch.optim.Adam(n.parameters()), "SGD"),
        ({"lamb": True}, sgd, "Adam"),
        ({"lars": True}, lambda n: sgd(n, weight_decay=0.1), "weight_decay"),
        (
            {"lars": True, "lars_configs": {"exclude_from_weight_decay": ["nrom"]}},
            sgd,
            r"(?s)nrom.*norm",
        ),
        ({"recompute": True, "recompute_configs": {"checkpoints": ["furst"]}}, sgd, r"called 'furst' \(near: first"),
        ({"lars": True, "lamb": True}, sgd, "(?s)lars.*lamb"),
    ],
)
def test_what_a_strategy_cannot_do_raises(settings, inner, message):
    strategy = fleet.DistributedStrategy(**settings)
    with pytest.raises((ValueError, TypeError), match=message):
        fleet.distributed_optimizer(inner(prepared(strategy)), strategy)


def test_every_unbuilt_feature_is_named_when_used():
    from fleetx.strategy import UNBUILT

    for name in UNBUILT:
        strategy = fleet.DistributedStrategy(**{name: True})
        with pytest.raises(ValueError, match=name):
            prepared(strategy)


def test_misuse_is_explained():
    net = plain.make_net()
    with pytest.raises(TypeError, match="takes an nn.Module, not a list"):
        fleet.distributed_model([net])
    with pytest.raises(TypeError, match="must be a fleet.DistributedStrategy, not a dict"):
        fleet.distributed_model(net, {"amp": True})
    with pytest.raises(ValueError, match=r"9 of the optimizer's 9 parameters.*Call model = fleet.distributed_model"):
        fleet.distributed_optimizer(sgd(net))
    fleet.distributed_model(net)
    with pytest.raises(ValueError, match="once is enough"):
        fleet.distributed_model(net)
    with pytest.raises(ValueError, match="the model of unused was prepared with another strategy"):
        fleet.distributed_optimizer(sgd(net), fleet.DistributedStrategy(gradient_merge=True))
    with pytest.raises(TypeError, match="takes a torch optimizer"):
        fleet.distributed_optimizer(net)
    optimizer = sgd(net)
    with pytest.raises(ValueError, match="clip_norm must be a number above 0"):
        fleet.distributed_optimizer(optimizer, clip_norm=-1.0)
    with pytest.raises(ValueError, match="nonfinite_limit must be an int of at least 1"):
        fleet.distributed_optimizer(optimizer, nonfinite_limit=0)
    with pytest.raises(TypeError, match="torch lr scheduler, not a str"):
        fleet.distributed_optimizer(optimizer, scheduler="cosine")
    with pytest.raises(TypeError, match="ReduceLROnPlateau needs a metric"):
        fleet.distributed_optimizer(optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(ValueError, match="made for another optimizer"):
        fleet.distributed_optimizer(optimizer, scheduler=torch.optim.lr_scheduler.StepLR(sgd(net), 1))
    distributed = fleet.distributed_optimizer(optimizer)
    with pytest.raises(TypeError, match="distributed already"):
        fleet.distributed_optimizer(distributed)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_halves_of_complex_numbers_are_refused():
    net = nn.Linear(2, 2)
    net.phase = nn.Parameter(torch.ones(2, dtype=torch.complex32))
    with pytest.raises(TypeError, match=r"the parameter 'phase' is torch.complex32.*Make it torch.complex64"):
        prepared(net=net)
    net.phase.requires_grad_(False)
    prepared(net=net)


def test_a_learning_rate_of_whole_numbers_is_refused():
    net = prepared()
    with pytest.raises(TypeError, match=r"lr must be .* tensor\(1\), in which schedulers would write 0.*give a float"):
        fleet.distributed_optimizer(sgd(net, lr=torch.tensor(1)))


def test_parameters_of_a_loss_must_be_prepared_too():
    net, loss = prepared(), nn.Linear(2, 2)
    both = torch.optim.SGD([*net.parameters(), *loss.parameters()], lr=0.1)
    with pytest.raises(
        ValueError, match=r"2 of the optimizer's 11 parameters \(the first is number 9, of shape \(2, 2\)"
    ):
        fleet.distributed_optimizer(both)
    fleet.distributed_model(loss)
    fleet.distributed_optimizer(both)


def test_float16_hints_at_bfloat16_once(said):
    for _ in range(2):
        prepared(fleet.DistributedStrategy(amp=True), nn.Linear(2, 2))
    assert said.text.count("amp_configs = {'dtype': 'bfloat16'}") == 1


def test_bfloat16_says_that_it_does_not_scale(said):
    prepared(fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"}), nn.Linear(2, 2))
    assert not said.text
    configs = {"dtype": "bfloat16", "init_loss_scaling": 8.0}
    prepared(fleet.DistributedStrategy(amp=True, amp_configs=configs), nn.Linear(2, 2))
    assert "losses are not scaled" in said.text


def test_configs_of_a_switch_that_is_off_are_mentioned(said):
    prepared(fleet.DistributedStrategy(gradient_merge_configs={"k_steps": 4}))
    assert "gradient_merge_configs is set, but gradient_merge is off" in said.text


def test_other_data_parallel_wrappers_are_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"DistributedDataParallel.*second time.*give the model itself"):
            fleet.distributed_model(wrapped)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            {"nccl_comm_num": 3, "use_hierarchical_allreduce": True},
            "use_hierarchical_allreduce and nccl_comm_num change",
        ),
        ({"fp16_allreduce": True, "nccl_comm_num": 2}, "fp16_allreduce and nccl_comm_num change"),
        ({"bf16_allreduce": True}, "bf16_allreduce changes"),
    ],
)
def test_communication_of_a_worker_alone_is_an_explained_no_op(said, settings, names):
    prepared(fleet.DistributedStrategy(**settings))
    assert f"{names} nothing for a worker alone: it sends nothing." in said.text


def test_sizes_of_buckets_that_are_not_fused_are_mentioned(said):
    strategy = fleet.DistributedStrategy(fuse_all_reduce_ops=False, last_comm_group_size_MB=1.0)  # its default
    prepared(strategy)
    assert "are set" not in said.text
    assert "is set" not in said.text
    prepared(fleet.DistributedStrategy(fuse_all_reduce_ops=False, fuse_grad_size_in_MB=16))
    assert "fuse_grad_size_in_MB is set, but fuse_all_reduce_ops is off" in said.text


def test_ranks_of_a_hierarchy_that_is_off_are_mentioned(said):
    prepared(fleet.DistributedStrategy(hierarchical_allreduce_inter_nranks=4))
    assert "hierarchical_allreduce_inter_nranks is set, but use_hierarchical_allreduce is off" in said.text


def test_alone_it_is_a_world_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    fleet.init()
    assert (fleet.worker_index(), fleet.worker_num(), fleet.is_first_worker()) == (0, 1, True)
    fleet.barrier_worker()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="parameter servers"):
        fleet.init(is_collective=False)


@pytest.fixture
def group_of_one(tmp_path):
    """A process group that other code has started."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_process_group_of_other_code_is_used_and_left_to_it(said):
    for _ in range(2):
        fleet.init()
    line = "fleet.init() uses the process group that is already up: 1 workers, cpu:gloo,cuda:gloo."
    assert [record.message for record in said.records] == [line]
    fleet.init(backend="gloo")
    fleet.shutdown()
    assert dist.is_initialized()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
        | {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
        | {"PMIX_NAMESPACE": "1"},
    ],
    ids=["torchrun", "srun", "mpirun"],
)
def test_a_process_group_without_some_of_the_workers_is_refused(environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"must span all workers, .* has 1 of the 2 .*world_size=2, or call"):
        fleet.init()


@pytest.mark.usefixtures("group_of_one")
def test_a_process_group_of_another_backend_is_refused():
    with pytest.raises(ValueError, match=r"backend must be that of .*'cpu:gloo,cuda:gloo', got 'nccl'. Leave it out"):
        fleet.init(backend="nccl")


def test_workers_that_did_not_join_do_not_train_alone(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"started 2 workers, but this one has not joined.*fleet.init\(\)"):
        prepared()
