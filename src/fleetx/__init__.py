"""FleetX: large-batch training for PyTorch."""

import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":  # before the imports below, which fail elsewhere with errors that explain nothing
    raise ImportError(
        f"FleetX runs on Linux only, and this is {sys.platform}: use a Linux machine, a container or WSL 2."
    )

from fleetx import fleet, optim
from fleetx.amp import LossScaler
from fleetx.batch_step import Step
from fleetx.checkpoint import Checkpoints
from fleetx.nonfinite import NonFiniteError
from fleetx.outcome import Outcome
from fleetx.strategy import DistributedStrategy
from fleetx.version import __version__

if TYPE_CHECKING:
    from fleetx.planner import Plan, plan

__all__ = [
    "Checkpoints",
    "DistributedStrategy",
    "LossScaler",
    "NonFiniteError",
    "Outcome",
    "Plan",
    "Step",
    "__version__",
    "fleet",
    "optim",
    "plan",
]


def __getattr__(name: str) -> Any:
    """The planner is imported when it is first asked for: most runs do without it."""
    if name not in ("Plan", "plan"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fleetx import planner

    return getattr(planner, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
