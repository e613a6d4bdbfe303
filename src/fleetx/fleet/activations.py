"""Carries out what a strategy says about activations: recompute, offload, and compiled segments."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fleetx.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleetx.memory import Applied


def prepare_activations(model: nn.Module, strategy: DistributedStrategy) -> None:
    """Cut the model where the strategy says; without recompute, only compile it if asked."""
    from fleetx import memory  # people who keep all activations need not wait for it

    if not strategy.recompute:
        if strategy.compile:
            memory.compile_parts(model)
        return
    if is_planned(model, strategy):
        _plan_later(model, strategy)
        return
    configs = strategy.recompute_configs
    home = "host" if configs.enable_offload else "device"
    names = _recommended(model) if configs.checkpoints == "auto" else list(configs.checkpoints)
    _check_shapes(memory.apply(model, names, home=home, compile=strategy.compile), configs.checkpoint_shape)


def is_planned(model: nn.Module, strategy: DistributedStrategy) -> bool:
    """Whether the planner decides: with "auto", where there is a budget, be it what a GPU has free."""
    configs = strategy.recompute_configs
    if not strategy.recompute or configs.checkpoints != "auto":
        return False
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return on_gpu or configs.memory_budget is not None


def _plan_later(model: nn.Module, strategy: DistributedStrategy) -> None:
    """With the first batch."""
    from fleetx.fleet.first_forward import FirstForward
    from fleetx.fleet.planning import Planning

    shape = list(strategy.recompute_configs.checkpoint_shape)
    planning = Planning(model, strategy, lambda applied: _check_shapes(applied, shape))
    FirstForward(planning).install(model)


def _check_shapes(applied: "Applied", shape: list[int]) -> None:
    if not shape:
        return
    check = _ShapeCheck(shape)
    for name in applied.cut_modules():
        module = applied.model.get_submodule(name)
        if not any(isinstance(hook, _ShapeCheck) for hook in module._forward_hooks.values()):
            module.register_forward_hook(check)


def _recommended(model: nn.Module) -> list[str]:
    recommended: Any = getattr(model, "checkpoints", None)
    if not isinstance(recommended, list) or not all(isinstance(name, str) for name in recommended):
        raise ValueError(
            'recompute_configs.checkpoints = "auto" without a memory_budget takes what the model recommends where the '
            f"model is on the CPU, and this one ({type(model).__name__}) has no list of names called `checkpoints`. "
            'Give a budget, for example memory_budget = "8GiB"; or name the modules whose outputs are good places to '
            'cut, for example ["encoder.layer.*"].'
        )
    return recommended


class _ShapeCheck:
    """Fleet needs the shape of all checkpoints beforehand. Here it is not needed, but what is said must be true."""

    def __init__(self, shape: list[int]) -> None:
        self.shape = tuple(shape)

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> None:
        """See the class. The first size is the batch, which may change."""
        if isinstance(output, Tensor) and tuple(output.shape[1:]) != self.shape[1:]:
            raise ValueError(
                f"recompute_configs.checkpoint_shape says {list(self.shape)}, and a checkpoint made by a "
                f"{type(module).__name__} is {list(output.shape)}. Correct the shape, or leave it out: any shapes work."
            )
