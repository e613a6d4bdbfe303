"""Puts a plan on a model, and takes it off again: by hooks alone, the model itself is not rewritten."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fleetx.memory import randomness
from fleetx.memory.asking import require_compile_options, require_list, require_name, require_use_of_host
from fleetx.memory.buffers import Watch
from fleetx.memory.compiling import SharedCompilations
from fleetx.memory.dear import KINDS
from fleetx.memory.experience import Experience
from fleetx.memory.names import Cuts, find_cuts, operation_name
from fleetx.memory.recording import Recorder
from fleetx.memory.running import Run, active_run, end_stale
from fleetx.memory.states import Home, Save, Segment
from fleetx.units import parse_bytes


def apply(
    model: nn.Module,
    segments: Sequence[str | Segment],
    *,
    save: Save = "inputs",
    home: Home = "device",
    host_memory: int | str | None = None,
    compile: bool = False,
    **compile_options: Any,
) -> "Applied":
    """Cut the model's forward at these outputs, and save of each segment what is asked for.

    A name stands for a `Segment` with the given `save` and `home`. What runs after the last cut stays as it is.
    `host_memory` ("20GiB") limits the bytes on the host; `compile` compiles modules between the cuts, one compilation
    for all that are alike. `remove()` of what is returned takes everything off again.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> applied = apply(model, ["1", "3"])
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> applied.remove()
    """
    own = [name for name in inspect.signature(apply).parameters if name != "compile_options"]
    require_compile_options(compile, compile_options, own)
    listed = require_list(segments)
    _require_unwrapped(model)
    for number, one in enumerate(listed):
        require_name(number, one, model)
    wanted = [one if isinstance(one, Segment) else Segment(one, save, home) for one in listed]
    if not wanted:
        raise ValueError("recompute needs at least one output where the model is cut, got none: name modules.")
    limit = None if host_memory is None else parse_bytes(host_memory)
    if limit is not None:
        require_use_of_host(host_memory, wanted)
    cuts = find_cuts(model, wanted)
    _require_parts_as_a_whole(model, cuts)
    experience = Experience(cuts, host_memory=limit)
    applied = Applied(model, experience)
    if compile:
        applied.compile(**compile_options)
    return applied.install()


class Applied:
    """A plan on a model."""

    def __init__(self, model: nn.Module, experience: Experience) -> None:
        self.model = model
        self.experience = experience

    def remove(self) -> None:
        """Take the plan off the model."""
        end_stale()  # a forward that was interrupted from the keyboard would never end any more
        run = active_run()
        if run is not None and run.experience is self.experience:
            raise RuntimeError("a plan cannot be taken off while its model runs: call remove() after the forward.")
        for module in self.model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if self._is_ours(hook)]:
                    del hooks[key]
                    _forget_options(module, key)

    def compile(self, **options: Any) -> SharedCompilations:
        """From now on compile the modules between the cuts; `options` are torch.compile's."""
        if self.experience.cuts.dear:
            raise ValueError(
                f"compiled segments know dear operations by kind only ({', '.join(KINDS)}), not by modules, got "
                f"{', '.join(self.experience.cuts.dear)}. Name kinds, or leave out compile."
            )
        if self.experience.compilations is None:
            self.experience.compilations = SharedCompilations(**options)
        return self.experience.compilations

    def cut_modules(self) -> list[str]:
        """The names of the modules whose outputs end segments."""
        return list(self.experience.cuts.modules)

    def statistics(self) -> dict[str, Any]:
        """What offload moved and what it costs; asking waits for the device."""
        offloader = self.experience.offloader
        if offloader is None:
            return {"bytes_to_host": 0, "bytes_to_device": 0, "exposed_ms": 0.0, "host_reserved": 0, "host_peak": 0}
        return {
            "bytes_to_host": offloader.traffic.to_host,
            "bytes_to_device": offloader.traffic.to_device,
            "exposed_ms": offloader.traffic.exposed_ms(),
            "host_reserved": offloader.arena.reserved,
            "host_peak": offloader.arena.most_in_use,
        }

    def __str__(self) -> str:
        states = [learned.state for learned in self.experience.segments] or self.experience.cuts.in_order()
        return "\n".join(f"until {state.until}: saves {state.save} on the {state.home}" for state in states)

    def _is_ours(self, hook: Any) -> bool:
        return isinstance(hook, _Hook) and hook.experience is self.experience

    def install(self) -> "Applied":
        """Put the hooks on the model's modules; on all of them or on none."""
        try:
            self._install()
        except Exception:
            self.remove()
            raise
        return self

    def _install(self) -> None:
        cuts = self.experience.cuts
        for module in unique(cuts.containers.values()):
            name = next(name for name, other in cuts.containers.items() if other is module)
            self._hook(module, Entering(self.experience, "container", name), Leaving(self.experience, "container"))
        for module in unique(cuts.leaves.values()):
            self._hook(module, Entering(self.experience, "leaf"), Leaving(self.experience, "leaf"))
        for module in unique(cuts.dear.values()):
            self._hook(module, Entering(self.experience, "dear"), Leaving(self.experience, "dear"))
        for name, segment in cuts.modules.items():
            self.model.get_submodule(name).register_forward_hook(Cutting(self.experience, segment))
        self._hook(self.model, Beginning(self.experience), Ending(self.experience))

    def _hook(self, module: nn.Module, before: Any, after: Any) -> None:
        # First before, last after: what others hook to the module happens inside, and again when it is repeated.
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)


class _Hook:
    """A hook of ours, into which the compiler must not look, should somebody compile the model."""

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


class Entering(_Hook):
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
            with run.busy():
                run.enter_leaf(module, args, kwargs)
        else:
            run.containers.append((self.name, {}))


class Leaving(_Hook):
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
            with run.busy():
                run.leave_leaf(output)
        elif run.containers:
            run.containers.pop()


class Cutting(_Hook):
    """An output that ends a segment is there."""

    def __init__(self, experience: Experience, segment: Segment) -> None:
        super().__init__(experience)
        self.segment = segment

    def act(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """See the class."""
        run = self.run()
        if run is not None and run.depth == 0:
            with run.busy():
                run.cut(self.segment)


class Beginning(_Hook):
    """The model begins."""

    def act(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        """See the class."""
        end_stale()
        run = self.run()
        if run is not None and _is_under_way(module):
            run.nested += 1  # the model calls itself
            return
        if run is not None:
            run.end(failed=True)  # interrupted from the keyboard: nobody told us of its end
        if "torch._dynamo" in sys.modules:
            _refuse_foreign_compilation(module, self.experience)
        if torch.is_grad_enabled():
            for one in self.experience.cuts.watched():
                _put_in_order(one)
            Run(self.experience, module)


class Ending(_Hook):
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
            warnings.warn(grievance, stacklevel=2)


def _refuse_foreign_compilation(model: nn.Module, experience: Experience) -> None:
    """What happens between modules happens in Python: a compiler around it would see other calls than there are."""
    parts = {"": model, **experience.cuts.containers, **experience.cuts.leaves}
    compiled = [name or "the model" for name, part in parts.items() if part._compiled_call_impl is not None]
    if compiled or _is_within_compiled_call():
        raise RuntimeError(_compiled_from_outside(compiled[0] if compiled else "its call"))


def _compiled_from_outside(what: str) -> str:
    return (
        f"a model with a plan must not be compiled from outside, and {what} is. "
        "Let the plan compile what runs between the cuts: memory.apply(..., compile=True), or strategy.compile."
    )


def _require_not_compiled(model: nn.Module) -> None:
    """What torch.compile(module) gives is a module around the module, which calls it where no plan can see."""
    if "torch._dynamo" not in sys.modules:  # nobody compiled anything
        return
    from torch._dynamo.eval_frame import OptimizedModule

    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule):
            what = repr(name) if name else "this one (the result of torch.compile)"
            raise ValueError(_compiled_from_outside(what))


def _is_within_compiled_call() -> bool:
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def _is_under_way(module: nn.Module) -> bool:
    """Whether the module was called further up, not only just now."""
    frame, calls = sys._getframe(), 0
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


def _put_in_order(module: nn.Module) -> None:
    """Others may have hooked the module since: what they do must come after our beginning and before our end."""
    ordered: list[tuple[Any, bool]] = [(module._forward_pre_hooks, False), (module._forward_hooks, True)]
    for hooks, last in ordered:
        ours = [key for key, hook in hooks.items() if isinstance(hook, _Hook)]
        keys = list(hooks)
        if ours != (keys[len(keys) - len(ours) :] if last else keys[: len(ours)]):
            for key in ours if last else reversed(ours):
                hooks.move_to_end(key, last=last)


def unique(modules: Any) -> Iterator[nn.Module]:
    """Each module once."""
    return iter({id(module): module for module in modules}.values())


def applied_to(model: nn.Module) -> Applied | None:
    """The plan on a model, also on a copy of one that has it."""
    beginnings = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Beginning)]
    return Applied(model, beginnings[0].experience) if beginnings else None


def _forget_options(module: nn.Module, key: int) -> None:
    """torch keeps what it knows of a hook beside it."""
    for options in (
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ):
        options.pop(key, None)


def outputs(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Everything the model can be cut at, in the order of a forward on these inputs: modules and their operations.

    The forward leaves no trace in the model's buffers, nor in the random generators.
    """
    found: list[str] = []
    stack: list[tuple[str, dict[str, int]]] = []

    class Listing:
        def is_listening(self) -> bool:
            return bool(stack)

        def calling(self, args: Any, kwargs: Any, written: Any) -> AbstractContextManager[None]:  # noqa: ARG002
            return nullcontext()

        def called(self, function: Any, args: Any, kwargs: Any, output: Any, begun: Any) -> None:  # noqa: ARG002
            found.append(operation_name(stack[-1][0], function, stack[-1][1]))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append((name, {})), prepend=True))

        def leave(*_: Any, name: str = name) -> None:
            stack.pop()
            if name:
                found.append(name)

        handles.append(module.register_forward_hook(leave, always_call=True))
    device = randomness.devices_of([*model.parameters(), *model.buffers()])
    present = randomness.state(device)
    try:
        with Watch().before(model).restored(), randomness.replaying(present, device):  # noqa: SIM117
            with Recorder(Listing()), torch.no_grad():
                model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _require_unwrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"fleetx.memory.apply takes an nn.Module, not a {type(model).__name__}.")
    if applied_to(model) is not None:
        raise ValueError("this model has a plan already: call remove() of the first one before.")
    _require_no_plan_around(model)
    _require_not_compiled(model)
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"the model checkpoints itself ({name + '.' if name else ''}gradient_checkpointing is True), and "
                "everything would be computed a third time. Set it to False first, as "
                "model.gradient_checkpointing_disable() does for models of transformers."
            )


def _require_no_plan_around(model: nn.Module) -> None:
    """A plan on a model around this one has hooks on it, unless it runs this one deep inside of a whole.

    Hooks on modules further inside tell nothing: two models may share them, each with a plan of its own.
    """
    if _hooks_of(model):
        raise ValueError(
            "a model around this one has a plan already, and two plans would cut the same forward. Have one plan: "
            "remove() the first, and name all cuts from the outer model, such as 'encoder.layer.0'."
        )


def _require_parts_as_a_whole(model: nn.Module, cuts: Cuts) -> None:
    """A part may have a plan of its own where this one runs it as a whole; its segments then are inside of one."""
    whole = {id(module) for module in cuts.leaves.values()}
    for name, module in model.named_modules():
        if id(module) not in whole and applied_to(module) is not None:
            raise ValueError(
                f"{name!r} has a plan already, and this one would not run it as a whole. Have one plan: take the first "
                f"off with memory.applied_to(model.{name}).remove(), and name its cuts from here, as '{name}...'."
            )


def _hooks_of(module: nn.Module) -> list[_Hook]:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, _Hook)]
