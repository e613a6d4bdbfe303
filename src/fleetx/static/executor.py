"""The executor: feeds arrays by name, runs the compiled step, gives back what was asked for by name.

Forward and backward are compiled as one graph and its gradient, the update by itself, since `backward` cannot live
inside a graph. What is fetched from inside the model is an extra output of the compiled forward, so each set of fetched
outputs has a compilation of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fleetx.comm.broadcast import broadcast_module
from fleetx.fleet.model import require_joined
from fleetx.fleet.optimizer import DistributedOptimizer
from fleetx.static.bound import BoundProgram, lock_of
from fleetx.static.building import materialise
from fleetx.static.fetching import as_array, as_list
from fleetx.static.places import CPUPlace, CUDAPlace, Place
from fleetx.static.program import Program, StartupProgram, default_main_program


class Executor:
    """Runs programs on one device.

    >>> import torch
    >>> from fleetx import static
    >>> program = static.Program(
    ...     static.build(torch.nn.Linear, 2, 1),
    ...     lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ...     compute=lambda model, batch: model(batch["x"]).square().mean(),
    ...     compile=False,
    ... )
    >>> exe = static.Executor(static.CPUPlace())
    >>> exe.run(static.StartupProgram(program))
    []
    >>> losses = [exe.run(program, feed={"x": [[1.0, 2.0]]}, fetch_list=["loss"])[0] for _ in range(20)]
    >>> bool(losses[-1] < losses[0])
    True
    """

    def __init__(self, place: Place | None = None) -> None:
        if place is not None and not isinstance(place, CPUPlace | CUDAPlace):
            raise TypeError(f"Executor takes CPUPlace() or CUDAPlace(0), not {place!r}.")
        self.place = place or CPUPlace()

    def run(
        self,
        program: Program | StartupProgram | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Any] = (),
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run a program once. The main program: one micro-batch; the one that fills the window also updates.

        Gives one value for each entry of `fetch_list`, as arrays, or as tensors on the device with
        `return_numpy=False`. Parameters and buffers are those after the run; a gradient is that of the whole window,
        over all workers, neither scaled nor clipped, and None while the window is not full. Threads may run programs:
        those of one model wait for each other.
        """
        if isinstance(program, StartupProgram):
            self._start(program, feed, as_list(fetch_list))
            return []
        program = _checked(program)
        with lock_of(program.require_model()):
            values = self._bound(program).run({} if feed is None else feed, as_list(fetch_list))
        return [as_array(value) for value in values] if return_numpy else values

    def compilations(self, program: Program | None = None) -> int:
        """Graphs compiled for a program so far, forwards and updates."""
        return sum(bound.log.graphs for bound in _checked(program).bound.values())

    def optimizer(self, program: Program | None = None) -> DistributedOptimizer:
        """What moves the program's weights: for `flush()` at the end of an epoch, to save and to resume."""
        program = _checked(program)
        with lock_of(program.require_model()):
            optimizer = self._bound(program).optimizer
        if optimizer is None:
            raise ValueError("the program has no optimizer: it was made without one, or cloned for_test.")
        return optimizer

    def _start(self, program: StartupProgram, feed: Any, wanted: list[Any]) -> None:
        if feed or wanted:
            raise ValueError("the startup program makes weights: it takes no feed and gives nothing to fetch.")
        require_joined()
        model = program.main.require_model()
        with lock_of(model):
            materialise(model, self.place.device, program.main.seed)
            # Weights that were made from the seed are equal already; those that came with the model may not be.
            broadcast_module(model)

    def _bound(self, program: Program) -> BoundProgram:
        device = self.place.device
        if device not in program.bound:
            program.bound[device] = BoundProgram(program, device)
        return program.bound[device]


def _checked(program: Any) -> Program:
    program = default_main_program() if program is None else program
    if not isinstance(program, Program):
        raise TypeError(f"an executor runs programs, not a {type(program).__name__}: wrap a model in Program(model).")
    return program
