"""Paddle's spellings, for scripts of the guide: change their imports to

    from fleetx.compat import fleet, fleet_lightning, fluid, paddle, role_maker

Every name is thin: it leads to the same code as FleetX's own.
"""

from types import SimpleNamespace

from fleetx import fleet as _fleet
from fleetx.applications import parse_train_configs
from fleetx.compat import applications, optimizers
from fleetx.compat.places import CUDAPlace
from fleetx.compat.variables import global_scope
from fleetx.static import CPUPlace, Executor, default_main_program, default_startup_program
from fleetx.strategy import BuildStrategy, DistributedStrategy, ExecutionStrategy


class PaddleCloudRoleMaker:
    """Who this worker is comes from the launcher's environment; there is nothing to make."""

    def __init__(self, is_collective: bool = False) -> None:
        if not is_collective:
            raise ValueError(
                "PaddleCloudRoleMaker(is_collective=False) means parameter servers, which FleetX does not have. "
                "Write PaddleCloudRoleMaker(is_collective=True)."
            )


def _init(role: PaddleCloudRoleMaker | None = None, is_collective: bool = True) -> None:
    """Join the job; the role says nothing that the environment does not."""
    if role is not None and not isinstance(role, PaddleCloudRoleMaker):
        raise TypeError(f"fleet.init takes a PaddleCloudRoleMaker, not a {type(role).__name__}.")
    _fleet.init(is_collective=is_collective)


role_maker = SimpleNamespace(PaddleCloudRoleMaker=PaddleCloudRoleMaker)

fleet = SimpleNamespace(
    init=_init,
    DistributedStrategy=DistributedStrategy,
    distributed_model=_fleet.distributed_model,
    distributed_optimizer=optimizers.distributed_optimizer,
    worker_index=_fleet.worker_index,
    worker_num=_fleet.worker_num,
    is_first_worker=_fleet.is_first_worker,
    barrier_worker=_fleet.barrier_worker,
)

_static = SimpleNamespace(
    CPUPlace=CPUPlace,
    CUDAPlace=CUDAPlace,
    Executor=Executor,
    ExecutionStrategy=ExecutionStrategy,
    BuildStrategy=BuildStrategy,
    default_main_program=default_main_program,
    default_startup_program=default_startup_program,
    global_scope=global_scope,
)

fluid = SimpleNamespace(
    **vars(_static),
    optimizer=SimpleNamespace(Adam=optimizers.Adam, Momentum=optimizers.Momentum),
)

paddle = SimpleNamespace(
    static=_static,
    optimizer=fluid.optimizer,
    default_main_program=default_main_program,
    default_startup_program=default_startup_program,
    fluid=fluid,
)

fleet_lightning = SimpleNamespace(applications=applications, parse_train_configs=parse_train_configs)

__all__ = ["fleet", "fleet_lightning", "fluid", "paddle", "role_maker"]
