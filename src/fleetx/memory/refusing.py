"""Models on which a plan cannot be put."""

from torch import nn

from fleetx.memory.foreign import refuse_gradient_checkpointing
from fleetx.memory.hooks import hooks_of, plan_on
from fleetx.memory.names import Cuts

HAS_A_PLAN = "this model has a plan already: take it off first, with fleetx.memory.applied_to(model).remove()."


def require_unwrapped(model: nn.Module) -> None:
    """A model that has no plan, and does not checkpoint itself."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"fleetx.memory.apply takes an nn.Module, not a {type(model).__name__}.")
    if plan_on(model) is not None:
        raise ValueError(HAS_A_PLAN)
    _require_no_plan_around(model)
    refuse_gradient_checkpointing(model, list(model.modules()))


def _require_no_plan_around(model: nn.Module) -> None:
    """A plan on a model around this one has hooks on it, unless it runs this one deep inside of a whole.

    Hooks on modules further inside tell nothing: two models may share them, each with a plan of its own.
    """
    if hooks_of(model):
        raise ValueError(
            "a model around this one has a plan already, and two plans would cut the same forward. Have one plan: "
            "remove() the first, and name all cuts from the outer model, such as 'encoder.layer.0'."
        )


def require_parts_as_a_whole(model: nn.Module, cuts: Cuts) -> None:
    """A part may have a plan of its own where this one runs it as a whole; its segments then are inside of one."""
    whole = {id(module) for module in cuts.leaves.values()}
    for name, module in model.named_modules():
        if id(module) not in whole and plan_on(module) is not None:
            raise ValueError(
                f"{name!r} has a plan already, and this one would not run it as a whole. Have one plan: take the first "
                f"off with memory.applied_to(model.{name}).remove(), and name its cuts from here, as '{name}...'."
            )
