"""Programs: a model with what it minimises and how, bound once and run many times."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fleetx.slicing import Batch
from fleetx.strategy import DistributedStrategy

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Variable:
    """A name that can be fetched."""

    name: str


@dataclass(eq=False)
class Program:
    """What an executor runs: the model's training step, or without an optimizer its forward.

    `optimizer` makes a torch optimizer from parameters, since these have no memory before startup; `scheduler` makes a
    schedule from that optimizer. `compute(model, batch)` gives the loss where the model does not return it itself.
    `compile=False` runs eagerly, and `mode` is torch.compile's.
    """

    model: nn.Module | None = None
    optimizer: MakeOptimizer | None = None
    strategy: DistributedStrategy | None = None
    compute: Callable[[nn.Module, Batch], Any] | None = None
    scheduler: Callable[[Optimizer], Any] | None = None
    clip_norm: float | None = None
    compile: bool = True
    mode: str | None = None
    seed: int = 0
    # What executors made of the program, by device; a program may move to another executor.
    bound: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names that a feed may give."""
        model = self.require_model()
        names = getattr(model, "inputs", None)
        return tuple(names) if names else tuple(inspect.signature(model.forward).parameters)

    def clone(self, for_test: bool = False) -> "Program":
        """A program on the same model; `for_test` leaves out the update."""
        optimizer = None if for_test else self.optimizer
        return Program(self.model, optimizer, self.strategy, self.compute, compile=self.compile, seed=self.seed)

    def require_model(self) -> nn.Module:
        """The model, or an error that says how to get one into the program."""
        if self.model is None:
            raise ValueError(
                "the program is empty: give Program(model, optimizer=...), or call optimizer.minimize(model.loss) in "
                "a script of the guide before the executor runs."
            )
        return self.model


@dataclass(eq=False)
class StartupProgram:
    """Running it gives the main program's model its weights."""

    main: Program


_main = Program()
_startup = StartupProgram(_main)


def default_main_program() -> Program:
    """The program that scripts of the guide build without naming it."""
    return _main


def default_startup_program() -> StartupProgram:
    """What must run once before the default main program."""
    return _startup


def reset_default_programs() -> None:
    """Forget what was built, for a second script in the same process."""
    global _main, _startup
    _main = Program()
    _startup = StartupProgram(_main)
