"""Fleet's verbs: join the job, prepare a model, wrap an optimizer."""

from fleetx.fleet.job import (
    barrier_worker,
    init,
    is_first_worker,
    shutdown,
    worker_index,
    worker_num,
)
from fleetx.fleet.model import distributed_model
from fleetx.fleet.optimizer import DistributedOptimizer, distributed_optimizer
from fleetx.strategy import BuildStrategy, DistributedStrategy, ExecutionStrategy

__all__ = [
    "BuildStrategy",
    "DistributedOptimizer",
    "DistributedStrategy",
    "ExecutionStrategy",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "init",
    "is_first_worker",
    "shutdown",
    "worker_index",
    "worker_num",
]
