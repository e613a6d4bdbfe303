"""FleetX: large-batch training for PyTorch."""

from fleetx import fleet, optim
from fleetx.amp import LossScaler
from fleetx.batch_step import Step
from fleetx.checkpoint import Checkpoints
from fleetx.nonfinite import NonFiniteError
from fleetx.outcome import Outcome
from fleetx.strategy import DistributedStrategy
from fleetx.version import __version__

__all__ = [
    "Checkpoints",
    "DistributedStrategy",
    "LossScaler",
    "NonFiniteError",
    "Outcome",
    "Step",
    "__version__",
    "fleet",
    "optim",
]
