"""For loops that call the model themselves: the first forward that is part of a training is planned before it runs."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fleetx.slicing import batch_size, map_tensors

if TYPE_CHECKING:
    from fleetx.fleet.planning import Planning


class FirstForward:
    """A hook that goes away after its first use. A copy of the model has one that does nothing."""

    _torchdynamo_disable = True

    def __init__(self, planning: "Planning | None" = None) -> None:
        self._planning = None if planning is None else weakref.ref(planning)
        self._handle: Any = None

    def __reduce__(self) -> Any:
        return FirstForward, ()

    def install(self, model: nn.Module) -> None:
        """Put it before all other hooks of the model."""
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """See the module. A forward that nobody could minimise is left alone, and so are those of other doors."""
        planning = None if self._planning is None else self._planning()
        if planning is None or planning.door != "minimize" or planning.optimizer is None:
            return
        if not torch.is_grad_enabled():
            return
        require_possible(planning)
        self._handle.remove()
        known = set(model._forward_pre_hooks)
        k_steps = planning.optimizer.engine.k_steps
        _plan(planning, model, args, kwargs, k_steps)
        # The forward has begun, so that the hooks of the plan would miss it.
        for key, hook in list(model._forward_pre_hooks.items()):
            if key not in known:
                hook(model, args, kwargs)


def _plan(planning: "Planning", model: nn.Module, args: Any, kwargs: Any, k_steps: int) -> None:
    from fleetx.planner.feeding import Feeding

    # Inputs may come out of another model, whose graph is not to be run here.
    sample = map_tensors({"args": tuple(args), "kwargs": dict(kwargs)}, Tensor.detach)
    try:
        size = batch_size(sample)
    except (TypeError, ValueError) as error:
        error.add_note(
            'FleetX: recompute_configs.checkpoints = "auto" plans a model by its first inputs, which it must be able '
            "to cut. Train with fleetx.Step, or name the checkpoints."
        )
        raise
    planning.begin(Feeding(model, compute=called), sample, samples=size * k_steps, k_steps=k_steps)


def called(model: nn.Module, batch: Any) -> Any:
    """The model's output for what it was called with."""
    return model(*batch["args"], **batch["kwargs"])


def require_possible(planning: "Planning") -> None:
    """Refuse what needs the whole batch of an update at once."""
    configs = planning.strategy.recompute_configs
    for name, why in (("global_batch", "cuts whole batches"), ("oom_retry", "repeats whole batches")):
        if getattr(configs, name):
            raise ValueError(
                f"recompute_configs.{name} {why}, which minimize() and programs do not see, got "
                f"{getattr(configs, name)!r}. Train with fleetx.Step, or leave {name} out."
            )
