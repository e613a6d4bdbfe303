"""Every spelling of the guide leads to something, and others are refused with the nearest."""

import pytest

import fleetx.compat as X
from fleetx import fleet as ours
from fleetx import static
from fleetx.compat import fleet, fleet_lightning, fluid, paddle, role_maker


@pytest.mark.parametrize(
    "name",
    [
        "X.applications.Resnet50",
        "X.parse_train_configs",
        "fleet.DistributedStrategy",
        "fleet.distributed_optimizer",
        "fleet.init",
        "fleet.worker_index",
        "fleet_lightning.applications.Bert_base",
        "fleet_lightning.applications.Bert_large",
        "fleet_lightning.parse_train_configs",
        "fluid.CUDAPlace",
        "fluid.ExecutionStrategy",
        "fluid.Executor",
        "fluid.default_startup_program",
        "fluid.optimizer.Adam",
        "paddle.default_main_program",
        "paddle.optimizer.Momentum",
        "paddle.static.default_main_program",
        "role_maker.PaddleCloudRoleMaker",
    ],
)
def test_the_guides_names_are_there(name):
    root, *path = name.split(".")
    found = globals()[root]
    for part in path:
        found = getattr(found, part)
    assert callable(found)


def test_programs_are_the_same_by_every_name():
    assert paddle.default_main_program() is paddle.static.default_main_program() is fluid.default_main_program()
    assert paddle.default_main_program() is static.default_main_program()
    assert fluid.default_startup_program().main is static.default_main_program()


def test_the_strategy_is_ours():
    assert fleet.DistributedStrategy is ours.DistributedStrategy
    assert (fleet.worker_index(), fleet.worker_num(), fleet.is_first_worker()) == (0, 1, True)
    fleet.barrier_worker()


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda: fluid.layers, "paddle.fluid has no 'layers' in FleetX.*valid names: .*Executor"),
        (lambda: paddle.optimizer.Adm, "paddle.optimizer has no 'Adm' in FleetX.*did you mean 'Adam'"),
        (lambda: fleet.distributed_optimiser, "did you mean 'distributed_optimizer'"),
        (lambda: paddle.static.default_main_programme, "did you mean 'default_main_program'"),
        (lambda: role_maker.UserDefinedRoleMaker, "role_maker has no 'UserDefinedRoleMaker'"),
        (lambda: fleet_lightning.aplications, "did you mean 'applications'"),
    ],
)
def test_other_names_are_refused_with_the_nearest(look, message):
    with pytest.raises(AttributeError, match=message):
        look()


def test_names_can_be_listed():
    assert {"Executor", "optimizer"} <= set(dir(fluid))
    assert repr(paddle.static) == "<paddle.static of fleetx.compat>"


def test_flags_of_the_guide():
    configs = X.parse_train_configs(["--lr", "0.4"])
    assert (configs.lr, configs.momentum, configs.batch_size) == (0.4, 0.9, 32)
