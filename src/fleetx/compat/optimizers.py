"""Paddle's optimizers: made before parameters exist, bound to a program by `minimize(model.loss)`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx import fleet
from fleetx.compat.names import translate_all
from fleetx.compat.variables import LossVariable
from fleetx.static import default_main_program
from fleetx.strategy import DistributedStrategy


class GuideOptimizer:
    """An optimizer of the guide. With `parameters` it is dynamic; without, `minimize` binds the default program."""

    def __init__(self, make: Callable[[Iterable[nn.Parameter]], Optimizer], parameters: Any = None) -> None:
        self.make = make
        self.strategy: DistributedStrategy | None = None
        self._dynamic = None if parameters is None else make(list(parameters))

    def minimize(self, loss: LossVariable | Tensor) -> None:
        """Static: bind the loss to the default program. Dynamic: apply the gradients that `backward()` left."""
        if isinstance(loss, LossVariable):
            program = default_main_program()
            program.model = loss.model
            program.optimizer = self.make
            program.strategy = self.strategy
            return
        if self._dynamic is None:
            raise ValueError(
                "minimize got a tensor, but the optimizer was made without parameters=: give it "
                "parameters=model.parameters() to train dynamically, or minimize(model.loss) to build a program."
            )
        # As in Paddle: the user's own backward() came before, and this only applies what it left.
        self._dynamic.step()

    def step(self) -> None:
        """Apply the gradients; dynamic only."""
        if self._dynamic is None:
            raise ValueError("step() needs parameters=: a static program is run by an Executor.")
        self._dynamic.step()

    def clear_grad(self) -> None:
        """Drop the gradients."""
        if self._dynamic is not None:
            self._dynamic.zero_grad()

    clear_gradients = clear_grad


def Momentum(learning_rate: float, momentum: float = 0.9, parameters: Any = None, **more: Any) -> GuideOptimizer:  # noqa: N802
    """SGD with momentum, by Paddle's argument names."""
    _refuse("Momentum", more)
    return GuideOptimizer(lambda p: torch.optim.SGD(p, lr=learning_rate, momentum=momentum), parameters)


def Adam(  # noqa: N802
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    parameters: Any = None,
    **more: Any,
) -> GuideOptimizer:
    """Adam, by Paddle's argument names."""
    _refuse("Adam", more)
    return GuideOptimizer(
        lambda p: torch.optim.Adam(p, lr=learning_rate, betas=(beta1, beta2), eps=epsilon), parameters
    )


def distributed_optimizer(
    optimizer: GuideOptimizer | Optimizer, strategy: DistributedStrategy | None = None
) -> GuideOptimizer | fleet.DistributedOptimizer:
    """As `fleet.distributed_optimizer`; one of the guide's takes the strategy along into its program."""
    if not isinstance(optimizer, GuideOptimizer):
        return fleet.distributed_optimizer(optimizer, strategy)
    optimizer.strategy = None if strategy is None else _translated(strategy)
    return optimizer


def _translated(strategy: DistributedStrategy) -> DistributedStrategy:
    """Paddle's names of checkpoints in ours."""
    ours = strategy.copy()
    checkpoints = ours.recompute_configs.checkpoints
    if not isinstance(checkpoints, str):
        ours.recompute_configs = {"checkpoints": translate_all(checkpoints)}
    return ours


def _refuse(name: str, more: dict[str, Any]) -> None:
    if more:
        raise ValueError(f"{name} does not take {', '.join(more)} here: decay and clipping belong to the strategy.")
