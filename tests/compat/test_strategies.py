"""Strategies of the guide: what is carried over, and that nothing is lost on the way."""

import logging

import pytest
import torch

import fleetx.compat as X
import fleetx.strategy
from fleetx.compat import fleet, fluid, paddle
from fleetx.compat.strategies import in_our_names

BLOCKS = ["2a", "2b", "2c", "3a", "3b", "3c", "3d", "4a", "4b", "4c", "4d", "4e", "4f", "5a", "5b", "5c"]


def test_the_guides_strategy_for_bert(told):
    exec_strategy = fluid.ExecutionStrategy()
    exec_strategy.num_threads = 2
    exec_strategy.num_iteration_per_drop_scope = 1
    assert not told.records  # not part of a strategy yet
    dist_strategy = fleet.DistributedStrategy()
    dist_strategy.execution_strategy = exec_strategy
    dist_strategy.recompute = False
    dist_strategy.nccl_comm_num = 3
    dist_strategy.use_hierarchical_allreduce = True
    assert dist_strategy.execution_strategy.num_threads == 2
    assert [record.levelno for record in told.records] == [logging.WARNING]
    assert "execution_strategy has no effect" in told.records[0].message
    optimizer = fleet.distributed_optimizer(fluid.optimizer.Adam(learning_rate=1e-4), dist_strategy)
    assert optimizer.strategy.nccl_comm_num == 3


def test_checkpoints_are_given_our_names():
    strategy = fleet.DistributedStrategy()
    names = [f"res{block}.add.output.5.tmp_0" for block in BLOCKS]
    strategy.recompute_configs = {"checkpoints": names, "enable_offload": False, "checkpoint_shape": []}
    ours = in_our_names(strategy, "a test")
    assert ours.recompute_configs.checkpoints == X.applications.Resnet50(width=4).checkpoints
    assert strategy.recompute_configs.checkpoints == names  # the overview shows what the user wrote


@pytest.mark.parametrize("checkpoints", ["auto", [], ["layer1.0", "layer2.*"]])
def test_other_checkpoints_stay(checkpoints):
    strategy = fleet.DistributedStrategy(recompute_configs={"checkpoints": checkpoints})
    assert in_our_names(strategy, "a test") == strategy


def test_a_change_after_its_use_is_refused():
    """It would do nothing: the program has its own copy."""
    strategy = fleet.DistributedStrategy()
    fleet.distributed_optimizer(fluid.optimizer.Adam(), strategy)
    with pytest.raises(TypeError, match="amp cannot be set: the strategy is in use by fleet.distributed_optimizer"):
        strategy.amp = True


def test_the_guides_exclusions_reach_lars():
    strategy = fleet.DistributedStrategy()
    strategy.lars = True
    strategy.lars_configs = {
        "lars_coeff": 0.001,
        "lars_weight_decay": 0.0005,
        "exclude_from_weight_decay": ["batch_norm", ".b_0"],
    }
    model = X.applications.Resnet50(classes=2, depths=(1, 1, 1, 1), width=2, image_size=32)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Momentum(learning_rate=0.01, momentum=0.9), strategy)
    optimizer.minimize(model.loss)
    paddle.default_main_program().compile = False
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(fluid.default_startup_program())
    overview = exe.optimizer().overview()
    # 4 blocks of 3 norms, their 4 projections' and the first one, each with weight and bias; the bias of fc.
    taken = [line.split()[:2] for line in overview.splitlines() if line.startswith("  ")]
    assert taken == [["pattern", "parameters"], ["batch_norm", "34"], [".b_0", "18"]]


@pytest.mark.parametrize("wrong", [{"amp": True}, "amp", fluid.ExecutionStrategy()])
def test_something_else_in_the_place_of_a_strategy_is_named(wrong):
    with pytest.raises(TypeError, match="strategy must be a fleet.DistributedStrategy, not a"):
        fleet.distributed_optimizer(fluid.optimizer.Adam(), wrong)


def test_what_is_not_built_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(fleetx.strategy, "UNBUILT", {"compile": "compiling"})
    strategy = fleet.DistributedStrategy(compile=True)
    with pytest.raises(ValueError, match="is not supported yet, got True"):
        fleet.distributed_optimizer(fluid.optimizer.Adam(), strategy)


def test_options_of_ours_go_to_dynamic_optimizers_only():
    model = fleet.distributed_model(torch.nn.Linear(2, 2))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=1.0)
    assert optimizer.engine.clip_norm == 1.0
    with pytest.raises(
        TypeError, match=r"static optimizer takes its strategy.*got clip_norm.*default_main_program\(\)"
    ):
        fleet.distributed_optimizer(fluid.optimizer.Adam(), clip_norm=1.0)
