"""Save and resume a run: atomically, verified, and bit for bit."""

from fleetx.checkpoint.checkpoints import Checkpoints, Resumed
from fleetx.checkpoint.errors import CheckpointError
from fleetx.checkpoint.inspecting import Inspected, inspect, survey
from fleetx.checkpoint.loading import PassedOver

__all__ = ["CheckpointError", "Checkpoints", "Inspected", "PassedOver", "Resumed", "inspect", "survey"]
