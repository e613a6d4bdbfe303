"""Fleet's verbs: join the job, prepare a model, wrap an optimizer."""

from fleetx.fleet.job import (
    barrier_worker,
    init,
    is_first_worker,
    shutdown,
    worker_index,
    worker_num,
)
from fleetx.fleet.leaving import alive, evenly, leave, request_stop, stop_requested
from fleetx.fleet.model import distributed_model
from fleetx.fleet.optimizer import DistributedOptimizer, distributed_optimizer
from fleetx.strategy import BuildStrategy, DistributedStrategy, ExecutionStrategy

__all__ = [
    "BuildStrategy",
    "DistributedOptimizer",
    "DistributedStrategy",
    "ExecutionStrategy",
    "alive",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "evenly",
    "init",
    "is_first_worker",
    "leave",
    "request_stop",
    "shutdown",
    "stop_requested",
    "worker_index",
    "worker_num",
]
