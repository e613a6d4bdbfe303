"""What a plan hangs on the modules of a model: when one begins and ends, the forward under way is told."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fleetx.memory.experience import Experience
from fleetx.memory.foreign import refuse_foreign_compilation
from fleetx.memory.recording import is_transforming
from fleetx.memory.running import Run
from fleetx.memory.states import Segment
from fleetx.memory.underway import active_run, calls_of, end_stale


class Hook:
    """A hook of ours, into which the compiler must not look, should somebody compile the model."""

    is_of_plan = True
    act: Callable[..., None]  # what the hook does
    _shielded: Callable[..., None] | None = None

    def __init__(self, experience: Experience, kind: str = "", name: str = "") -> None:
        self.experience = experience
        self.kind = kind
        self.name = name

    def __call__(self, *arguments: Any) -> None:
        """What torch calls."""
        if "torch._dynamo" not in sys.modules:  # nobody compiles, and importing the compiler takes its time
            self.act(*arguments)
            return
        own = type(self)
        if own._shielded is None:
            own._shielded = torch.compiler.disable(own.act)
        own._shielded(self, *arguments)

    def run(self) -> Run | None:
        """The forward under way, if it is one of this model."""
        run = active_run()
        return run if run is not None and run.experience is self.experience else None


class Entering(Hook):
    """A module begins."""

    def act(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """See the class."""
        if self.kind == "dear":
            self.experience.inside_dear += 1
            return
        run = self.run()
        if run is None:
            return
        if self.kind == "leaf":
            if not is_transforming():  # else what it does is overheard
                with run.busy():
                    run.wholes.enter(module, args, kwargs)
        else:
            run.containers.append((self.name, {}))


class Leaving(Hook):
    """A module ends, be it by an error."""

    def act(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        """See the class."""
        if self.kind == "dear":
            self.experience.inside_dear -= 1
            return
        run = self.run()
        if run is None:
            return
        if self.kind == "leaf":
            if not is_transforming():
                with run.busy():
                    run.wholes.leave(output)
        elif run.containers:
            run.containers.pop()


class Cutting(Hook):
    """An output that ends a segment is there."""

    def __init__(self, experience: Experience, segment: Segment) -> None:
        super().__init__(experience)
        self.segment = segment

    def act(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """See the class."""
        run = self.run()
        if run is not None and run.wholes.depth == 0:
            with run.busy():
                run.cut(self.segment)


class Beginning(Hook):
    """The model begins."""

    def act(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """See the class."""
        end_stale()
        run = self.run()
        if run is not None and calls_of(module) > 1:
            run.nested += 1  # the model calls itself
            return
        if run is not None:
            run.end(failed=True)  # interrupted from the keyboard: nobody told us of its end
        if "torch._dynamo" in sys.modules:
            refuse_foreign_compilation(module, self.experience)
        if torch.is_grad_enabled():
            for one in self.experience.cuts.watched():
                _put_in_order(one)
            Run(self.experience, module)


class Ending(Hook):
    """The model ends."""

    def act(self, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        """See the class."""
        run = self.run()
        if run is None:
            return
        if run.nested:
            run.nested -= 1
            return
        error = sys.exc_info()[1]
        failed = output is None and error is not None
        if failed and isinstance(error, torch.OutOfMemoryError):
            error.add_note(f"FleetX: in the forward, in the segment that would have ended at {run.frame.name!r}.")
        run.end(failed=failed)
        for grievance in [] if failed else self.experience.grievances():
            warnings.warn(grievance, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """How far up the first line is that is neither ours nor torch's: whoever called the model."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "fleetx"):
        frame, level = frame.f_back, level + 1
    return level


def hooks_of(module: nn.Module) -> list[Hook]:
    """Those of plans on the module, and on models around it."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, Hook)]


def plan_on(model: nn.Module) -> Experience | None:
    """What is known of the plan on a model, also on a copy of one that has it."""
    beginnings = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Beginning)]
    return beginnings[0].experience if beginnings else None


def _put_in_order(module: nn.Module) -> None:
    """Others may have hooked the module since: what they do must come after our beginning and before our end."""
    ordered: list[tuple[Any, bool]] = [(module._forward_pre_hooks, False), (module._forward_hooks, True)]
    for hooks, last in ordered:
        ours = [key for key, hook in hooks.items() if isinstance(hook, Hook)]
        keys = list(hooks)
        if ours != (keys[len(keys) - len(ours) :] if last else keys[: len(ours)]):
            for key in ours if last else reversed(ours):
                hooks.move_to_end(key, last=last)
