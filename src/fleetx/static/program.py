"""Programs: a model with what it minimises and how, bound once and run many times."""

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fleetx.fleet.checks import require_positive
from fleetx.notices import did_you_mean, shown
from fleetx.slicing import Batch
from fleetx.strategy import DistributedStrategy

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_FUNCTIONS = {
    "optimizer": "lambda parameters: torch.optim.SGD(parameters, lr=0.1)",
    "scheduler": "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)",
    "compute": "lambda model, batch: loss_fn(model(batch['x']), batch['y'])",
    "items": "lambda batch: len(batch['y'])",
}
_SEEDS = 2**63


@dataclass(frozen=True)
class Variable:
    """A name that can be fetched."""

    name: str


@dataclass(eq=False)
class Program:
    """What an executor runs: the model's training step, or without an optimizer its evaluation.

    `optimizer` makes a torch optimizer from parameters, since these have no memory before startup; `scheduler` makes a
    schedule from that optimizer. `compute(model, batch)` gives the loss where the model does not return it itself.
    `items(batch)` is the number of items that the loss averages over, where feeds differ in it. `compile=False` runs
    eagerly, and `mode` is torch.compile's. Once a program has run it cannot be changed; a clone can.
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
    items: Callable[[Batch], Any] | None = None
    # What executors made of the program, by device.
    bound: dict[Any, Any] = field(default_factory=dict, repr=False, init=False)

    def __post_init__(self) -> None:
        self._require_use_of_all()

    def __setattr__(self, name: str, value: Any) -> None:
        settings = [field.name for field in dataclasses.fields(self) if field.init]
        if name not in (*settings, "bound"):
            raise AttributeError(f"a program has no setting {name!r}; {did_you_mean(name, settings)}")
        if self.__dict__.get("bound"):
            raise RuntimeError(
                f"the program has run already, and setting its {name} now would change nothing. Set it before the "
                "first run, or on program.clone()."
            )
        _check_setting(name, value)
        super().__setattr__(name, value)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names that a feed may give."""
        model = self.require_model()
        names = getattr(model, "inputs", None)
        return tuple(names) if names else tuple(inspect.signature(model.forward).parameters)

    def clone(self, for_test: bool = False) -> "Program":
        """A program on the same model, with all settings; `for_test` leaves out the update, and so evaluates.

        Weights are shared. A clone that trains makes an optimizer of its own, so momentum and schedule start anew.
        """
        self.require_model()
        leaving_out: dict[str, Any] = {"optimizer": None, "scheduler": None, "clip_norm": None, "items": None}
        return dataclasses.replace(self, **(leaving_out if for_test else {}))

    def require_model(self) -> nn.Module:
        """The model, or an error that says how to get one into the program."""
        if self.model is None:
            raise ValueError(
                "the program is empty: give Program(model, optimizer=...), or call optimizer.minimize(model.loss) in "
                "a script of the guide before the executor runs or the program is cloned."
            )
        return self.model

    def check(self) -> None:
        """Raise if the program cannot run: each setting was checked when it was set, here they are seen together."""
        self.require_model()
        self._require_use_of_all()

    def _require_use_of_all(self) -> None:
        for name in ("scheduler", "clip_norm", "items"):
            if self.optimizer is None and getattr(self, name) is not None:
                raise ValueError(
                    f"the program has {name} but no optimizer, so nothing would be done with it: give optimizer= too, "
                    f"or leave {name} out."
                )


def _check_setting(name: str, value: Any) -> None:
    """Raise if a setting has a value that could not be used when the program runs."""
    if name == "compile":
        if not isinstance(value, bool):
            raise TypeError(f"compile must be True or False, got {shown(value)}: False runs eagerly.")
    elif name == "seed":
        _check_seed(value)
    elif name == "clip_norm":
        require_positive(name, value)
    elif value is None:
        return
    elif name == "model" and not isinstance(value, nn.Module):
        hint = ": give an object of it, or static.build(YourModel, ...)" if isinstance(value, type) else ""
        raise TypeError(f"Program takes an nn.Module, not a {type(value).__name__}{hint}.")
    elif name == "strategy" and not isinstance(value, DistributedStrategy):
        raise TypeError(f"strategy must be a fleet.DistributedStrategy, got {shown(value)}: None is all defaults.")
    elif name == "mode" and not isinstance(value, str):
        raise TypeError(f"mode must be one of torch.compile's names, got {shown(value)}: None is the default mode.")
    elif name in _FUNCTIONS and not callable(value):
        raise TypeError(
            f"Program takes a function as {name}, not a {type(value).__name__}: for example {name}={_FUNCTIONS[name]}."
        )


def _check_seed(seed: Any) -> None:
    rule = f"seed must be a whole number from 0 to 2**63 - 1, got {shown(seed)}: 0 is the default."
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(rule) from None
    if isinstance(seed, bool):
        raise TypeError(rule)
    if not 0 <= number < _SEEDS:
        raise ValueError(rule)


@dataclass(eq=False)
class StartupProgram:
    """Running it gives the main program's model its weights, the same ones on all workers."""

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
