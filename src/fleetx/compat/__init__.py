"""Paddle's spellings, for scripts of the guide: change their imports to

    from fleetx.compat import fleet, fleet_lightning, fluid, paddle, role_maker

or, where the guide writes `import fleetx as X`, to `import fleetx.compat as X`. Every name is thin: it leads to the
same code as FleetX's own.
"""

from fleetx import fleet as _fleet
from fleetx.applications import parse_train_configs
from fleetx.compat import applications
from fleetx.compat import joining as _joining
from fleetx.compat import models as _models
from fleetx.compat import optimizers as _optimizers
from fleetx.compat.executor import Executor as _Executor
from fleetx.compat.namespaces import Names as _Names
from fleetx.compat.places import CUDAPlace as _CUDAPlace
from fleetx.compat.variables import global_scope as _global_scope
from fleetx.static import CPUPlace as _CPUPlace
from fleetx.static import default_main_program as _default_main_program
from fleetx.static import default_startup_program as _default_startup_program

role_maker = _Names("role_maker", PaddleCloudRoleMaker=_joining.PaddleCloudRoleMaker)

fleet = _Names(
    "fleet",
    init=_joining.init,
    DistributedStrategy=_fleet.DistributedStrategy,
    distributed_model=_models.distributed_model,
    distributed_optimizer=_optimizers.distributed_optimizer,
    worker_index=_fleet.worker_index,
    worker_num=_fleet.worker_num,
    is_first_worker=_fleet.is_first_worker,
    barrier_worker=_fleet.barrier_worker,
)

_places = {"CPUPlace": _CPUPlace, "CUDAPlace": _CUDAPlace}
_programs = {"default_main_program": _default_main_program, "default_startup_program": _default_startup_program}
_executing = {
    "Executor": _Executor,
    "ExecutionStrategy": _fleet.ExecutionStrategy,
    "BuildStrategy": _fleet.BuildStrategy,
    "global_scope": _global_scope,
}
_optimizer = _Names("paddle.optimizer", Adam=_optimizers.Adam, Momentum=_optimizers.Momentum)

fluid = _Names("paddle.fluid", **_places, **_programs, **_executing, optimizer=_optimizer)

# 2.0 keeps places beside programs and optimizers; before it everything was in fluid.
paddle = _Names(
    "paddle",
    **_places,
    **_programs,
    static=_Names("paddle.static", **_places, **_programs, **_executing),
    optimizer=_optimizer,
    fluid=fluid,
)

fleet_lightning = _Names("fleet_lightning", applications=applications, parse_train_configs=parse_train_configs)

__all__ = [
    "applications",
    "fleet",
    "fleet_lightning",
    "fluid",
    "paddle",
    "parse_train_configs",
    "role_maker",
]
