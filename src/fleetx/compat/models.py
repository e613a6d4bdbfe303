"""Models trained dynamically: prepared as ours are, with the one method that the guide calls on them."""

from torch import nn

from fleetx import fleet
from fleetx.compat.strategies import in_our_names
from fleetx.strategy import DistributedStrategy


def distributed_model(model: nn.Module, strategy: DistributedStrategy | None = None) -> nn.Module:
    """As `fleetx.fleet.distributed_model`; the model also gets `clear_gradients()`, Paddle's word for `zero_grad()`.

    In the middle of a merge window clearing would lose micro-batches: the next `minimize` notices, and refuses.
    """
    prepared = fleet.distributed_model(model, in_our_names(strategy, "fleet.distributed_model"))
    # On this object only: a torch class that grew a method would surprise everybody else.
    object.__setattr__(prepared, "clear_gradients", prepared.zero_grad)
    return prepared
