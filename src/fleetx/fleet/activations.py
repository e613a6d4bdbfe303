"""Carries out what a strategy says about activations: recompute, offload, and compiled segments."""

from typing import Any

from torch import Tensor, nn

from fleetx.strategy import DistributedStrategy


def prepare_activations(model: nn.Module, strategy: DistributedStrategy) -> None:
    """Cut the model where the strategy says; without recompute, only compile it if asked."""
    from fleetx import memory  # people who keep all activations need not wait for it

    if not strategy.recompute:
        if strategy.compile:
            memory.compile_parts(model)
        return
    configs = strategy.recompute_configs
    home = "host" if configs.enable_offload else "device"
    names = _checkpoints(model, configs.checkpoints)
    applied = memory.apply(model, names, home=home, compile=strategy.compile)
    if configs.checkpoint_shape:
        check = _ShapeCheck(configs.checkpoint_shape)
        for name in applied.cut_modules():
            model.get_submodule(name).register_forward_hook(check)


def _checkpoints(model: nn.Module, wanted: list[str] | str) -> list[str]:
    if wanted != "auto":
        return list(wanted)
    recommended: Any = getattr(model, "checkpoints", None)
    if not isinstance(recommended, list) or not all(isinstance(name, str) for name in recommended):
        raise ValueError(
            'recompute_configs.checkpoints = "auto" takes what the model recommends, and this one '
            f"({type(model).__name__}) has no list of names called `checkpoints`. Name the modules whose outputs are "
            'good places to cut, for example ["encoder.layer.*"].'
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
