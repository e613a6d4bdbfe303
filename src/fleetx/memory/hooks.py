"""What a plan hangs on the modules of a model: it tells the forward under way when a module begins and ends."""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fleetx.memory.experience import Experience
from fleetx.memory.foreign import is_compiled_around, refuse_compiled_containers
from fleetx.memory.recording import is_transforming
from fleetx.memory.running import Run
from fleetx.memory.states import Segment
from fleetx.memory.traced import warn_of_kept
from fleetx.memory.underway import active_run, calls_of, end_stale


class Hook:
    """A hook of ours.

    If the user compiles the model, the compiler sees hooks that do nothing, and segments as `Traceable` has them.
    """

    is_of_plan = True
    act: Callable[..., None]  # what the hook does
    _shielded: Callable[..., None] | None = None

    def __init__(self, experience: Experience, kind: str = "", name: str = "") -> None:
        self.experience = experience
        self.kind = kind
        self.name = name

    def __call__(self, *arguments: Any) -> None:
        """What torch calls."""
        if torch.compiler.is_compiling() and not self.experience.why_not_traced:
            self.trace()
            return
        if "torch._dynamo" not in sys.modules:  # nobody compiles, and importing the compiler takes its time
            self.act(*arguments)
            return
        own = type(self)
        if own._shielded is None:
            own._shielded = torch.compiler.disable(own.act)
        own._shielded(self, *arguments)

    def trace(self) -> None:
        """What is done while a compiler traces the model."""

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
        if not torch.is_grad_enabled() or self._is_of_no_use():
            return
        for one in self.experience.cuts.watched():
            _put_in_order(one)
        Run(self.experience, module)

    def trace(self) -> None:
        """Warn of what the compiler cannot recompute."""
        if self.experience.traceable.kept and torch.is_grad_enabled():
            warn_of_kept(", ".join(self.experience.traceable.kept))

    def _is_of_no_use(self) -> bool:
        """Whether a run could not save anything: a compiler sees to it, or torch.func or jit.trace keeps everything."""
        if "torch._dynamo" in sys.modules:
            if is_compiled_around(self.experience):
                return True
            refuse_compiled_containers(self.experience)
            for leaf in self.experience.cuts.leaves.values():
                Called.install(leaf, self)
        what = "torch.func" if is_transforming() else "torch.jit.trace" if torch._C._get_tracing_state() else ""
        if what and what not in self.experience.warned:
            self.experience.warned.add(what)
            text = f"inside of {what} a plan does nothing: all activations are kept, as without a plan."
            warnings.warn(text, stacklevel=_level_of_caller())
        return bool(what)


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


class Called:
    """The call of a module that the user compiled and the plan runs as a whole.

    Its hooks are inside of what is compiled, where ours are silent. So ours are called around it.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], beginning: Beginning) -> None:
        self.module, self.compiled, self.beginning = module, compiled, beginning

    @classmethod
    def install(cls, module: nn.Module, beginning: Beginning) -> None:
        """See to it that our hooks are called, if the module was compiled since."""
        if module._compiled_call_impl is not None and not isinstance(module._compiled_call_impl, cls):
            module._compiled_call_impl = cls(module, module._compiled_call_impl, beginning)
            beginning.experience.traceable.uninstall([module])  # else it would be checkpointed inside as well

    @staticmethod
    def uninstall(module: nn.Module) -> None:
        """Make the module's call what the user made it."""
        if isinstance(module._compiled_call_impl, Called):
            module._compiled_call_impl = module._compiled_call_impl.compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What torch calls in place of the module's hooks and forward."""
        if torch.compiler.is_compiling() or self.beginning.run() is None:
            return self.compiled(*args, **kwargs)
        for hook in self._ours(self.module._forward_pre_hooks):
            hook.act(self.module, args, kwargs)
        output = None
        try:
            output = self.compiled(*args, **kwargs)
        finally:
            failed = output is None and sys.exc_info()[0] is not None
            for hook in self._ours(self.module._forward_hooks):
                if isinstance(hook, Leaving):
                    hook.act(self.module, args, kwargs, output)
                elif not failed:
                    hook.act(self.module, args, output)
        return output

    def _ours(self, hooks: Mapping[int, Any]) -> list[Hook]:
        experience = self.beginning.experience
        return [hook for hook in hooks.values() if isinstance(hook, Hook) and hook.experience is experience]


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
