"""Paddle's optimizers: made before parameters exist, and bound to a program by `minimize(model.loss)`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx import fleet
from fleetx.comm import world
from fleetx.compat.strategies import in_our_names
from fleetx.compat.variables import LossVariable
from fleetx.optim.checks import check_number, check_switch
from fleetx.static import default_main_program
from fleetx.strategy import DistributedStrategy

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class GuideOptimizer:
    """An optimizer of the guide. With `parameters` it is dynamic; without, `minimize` binds the default program."""

    def __init__(self, make: MakeOptimizer, parameters: Iterable[nn.Parameter] | None = None) -> None:
        self.make = make
        self.strategy: DistributedStrategy | None = None
        self.dynamic = None if parameters is None else make(list(parameters))

    def minimize(self, loss: LossVariable | Tensor) -> None:
        """Static: bind the loss to the default program. Dynamic: apply the gradients that your `backward()` left."""
        if isinstance(loss, LossVariable):
            self._bind(loss)
        else:
            self._apply("minimize of a tensor")

    def step(self) -> None:
        """Apply the gradients; dynamic only."""
        self._apply("step()")

    def clear_grad(self) -> None:
        """Drop the gradients; a static program does so by itself."""
        if self.dynamic is not None:
            self.dynamic.zero_grad()

    clear_gradients = clear_grad

    def _bind(self, loss: LossVariable) -> None:
        if self.dynamic is not None:
            raise ValueError(
                "minimize(model.loss) builds a program, which brings its own parameters, but the optimizer was made "
                "with parameters=: leave that out, or train dynamically with minimize(loss) of a tensor."
            )
        program = default_main_program()
        if program.model is not None:
            raise ValueError(
                f"the default main program minimises the loss of a {type(program.model).__name__} already, and takes "
                "one only. For a second script in one process call fleetx.static.reset_default_programs() in between."
            )
        program.model = loss.model
        program.optimizer = self.make
        program.strategy = self.strategy

    def _apply(self, what: str) -> None:
        if self.dynamic is None:
            raise ValueError(
                f"{what} is for dynamic training, but the optimizer was made without parameters=: give it "
                "parameters=model.parameters(), or call minimize(model.loss) to build a program for an Executor."
            )
        if world.launched_size() > 1:
            raise RuntimeError(
                f"{what} would train each of the {world.launched_size()} workers by itself: first wrap the optimizer "
                "with fleet.distributed_optimizer(optimizer, strategy)."
            )
        self.dynamic.step()


class DistributedGuideOptimizer(fleet.DistributedOptimizer):
    """Ours, with Paddle's words for `zero_grad`. Its `minimize` runs the backward itself: leave out your own."""

    def clear_grad(self) -> None:
        """Nothing to do between windows; in the middle of one it would lose micro-batches, so it raises."""
        self.zero_grad()

    clear_gradients = clear_grad


def Momentum(  # noqa: N802
    learning_rate: float = 0.001,
    momentum: float = 0.9,
    parameters: Iterable[nn.Parameter] | None = None,
    use_nesterov: bool = False,
    weight_decay: float | None = None,
    **more: Any,
) -> GuideOptimizer:
    """SGD with momentum, by Paddle's argument names; `weight_decay` is L2, as a float is in Paddle."""
    _refuse("Momentum", more)
    _check(learning_rate, weight_decay)
    check_number("momentum", momentum, below=1, usual="0.9 is usual")
    check_switch("use_nesterov", use_nesterov)
    decay = weight_decay or 0.0

    def make(tensors: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD(tensors, learning_rate, momentum, weight_decay=decay, nesterov=use_nesterov)

    return GuideOptimizer(make, parameters)


def Adam(  # noqa: N802
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    parameters: Iterable[nn.Parameter] | None = None,
    weight_decay: float | None = None,
    **more: Any,
) -> GuideOptimizer:
    """Adam, by Paddle's argument names; `weight_decay` is L2, as a float is in Paddle."""
    _refuse("Adam", more)
    _check(learning_rate, weight_decay)
    check_number("beta1", beta1, below=1, usual="0.9 is usual")
    check_number("beta2", beta2, below=1, usual="0.999 is usual")
    check_number("epsilon", epsilon, above=0, usual="1e-8 is usual")
    decay = weight_decay or 0.0

    def make(tensors: Iterable[nn.Parameter]) -> Optimizer:
        return torch.optim.Adam(tensors, learning_rate, (beta1, beta2), epsilon, decay)

    return GuideOptimizer(make, parameters)


def distributed_optimizer(
    optimizer: GuideOptimizer | Optimizer, strategy: DistributedStrategy | None = None, **options: Any
) -> GuideOptimizer | fleet.DistributedOptimizer:
    """As `fleetx.fleet.distributed_optimizer`, whose options a dynamic one takes too.

    A static one of the guide takes the strategy along into its program.
    """
    ours = in_our_names(strategy, "fleet.distributed_optimizer")
    if not isinstance(optimizer, GuideOptimizer):
        return fleet.distributed_optimizer(optimizer, ours, **options)
    if optimizer.dynamic is not None:
        return DistributedGuideOptimizer(optimizer.dynamic, ours, **options)
    if options:
        raise TypeError(
            f"a static optimizer takes its strategy and nothing else, got {', '.join(options)}: set scheduler and "
            "clip_norm on default_main_program()."
        )
    optimizer.strategy = ours
    return optimizer


def _check(learning_rate: Any, weight_decay: Any) -> None:
    check_number(
        "learning_rate", learning_rate, usual="write it as a number; a schedule is default_main_program().scheduler"
    )
    if weight_decay is not None:
        check_number("weight_decay", weight_decay, usual="1e-4 is usual, None is off")


def _refuse(name: str, more: dict[str, Any]) -> None:
    remedies = {
        "grad_clip": "set default_main_program().clip_norm, or clip_norm= of fleet.distributed_optimizer",
        "parameter_list": "it is called parameters here",
        "regularization": "give weight_decay a number, which means L2",
    }
    if more:
        listed = "; ".join(f"{given} ({remedies.get(given, 'leave it out')})" for given in more)
        raise TypeError(f"{name} does not take {listed}.")
