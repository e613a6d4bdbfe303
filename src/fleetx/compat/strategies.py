"""A strategy of the guide in our names."""

from fleetx.compat.names import translate_all
from fleetx.fleet.model import runnable
from fleetx.strategy import DistributedStrategy


def in_our_names(strategy: DistributedStrategy | None, used_by: str) -> DistributedStrategy:
    """A copy with Paddle's names of checkpoints in ours. The user's is frozen: a later change would do nothing."""
    ours = runnable(strategy).copy()
    checkpoints = ours.recompute_configs.checkpoints
    if checkpoints and not isinstance(checkpoints, str):
        ours.recompute_configs = {"checkpoints": translate_all(checkpoints)}
    if strategy is not None:
        strategy.freeze(used_by)
    return ours
