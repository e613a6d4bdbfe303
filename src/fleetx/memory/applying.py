"""Puts a plan on a model, and takes it off again: by hooks alone, the model itself is not rewritten."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from fleetx.memory.asking import require_compile_options, require_list, require_name, require_use_of_host
from fleetx.memory.compiling import SharedCompilations
from fleetx.memory.dear import KINDS
from fleetx.memory.experience import Experience
from fleetx.memory.foreign import require_compiled_within_segments
from fleetx.memory.hooks import Beginning, Called, Cutting, Ending, Entering, Hook, Leaving, plan_on
from fleetx.memory.names import find_cuts
from fleetx.memory.refusing import require_parts_as_a_whole, require_unwrapped
from fleetx.memory.states import Home, Save, Segment
from fleetx.memory.traced import Traceable
from fleetx.memory.underway import active_run, end_stale
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

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> applied = apply(model, ["1", "3"])
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> applied.remove()
    """
    own = [name for name in inspect.signature(apply).parameters if name != "compile_options"]
    require_compile_options(compile, compile_options, own)
    listed = require_list(segments)
    require_unwrapped(model)
    for number, one in enumerate(listed):
        require_name(number, one, model)
    wanted = [one if isinstance(one, Segment) else Segment(one, save, home) for one in listed]
    if not wanted:
        raise ValueError("recompute needs at least one output where the model is cut, got none: name modules.")
    limit = None if host_memory is None else parse_bytes(host_memory)
    if limit is not None:
        require_use_of_host(host_memory, wanted)
    cuts = find_cuts(model, wanted)
    require_parts_as_a_whole(model, cuts)
    require_compiled_within_segments(cuts)
    experience = Experience(cuts, Traceable.of(cuts), host_memory=limit)
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
        self.experience.traceable.uninstall()
        for module in self.model.modules():
            Called.uninstall(module)
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if self._is_ours(hook)]:
                    del hooks[key]
                    _forget_options(module, key)

    def __enter__(self) -> "Applied":
        """For `with apply(...)`: at its end the plan is taken off."""
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def compile(self, **options: Any) -> SharedCompilations:
        """From now on compile the modules between the cuts; `options` are torch.compile's."""
        if self.experience.cuts.dear:
            raise ValueError(
                f"compiled segments know dear operations by kind only ({', '.join(KINDS)}), not by modules, got "
                f"{', '.join(self.experience.cuts.dear)}. Name kinds, or leave out compile."
            )
        if self.experience.compilations is None:
            self.experience.compilations = SharedCompilations(**options)
            self.experience.traceable.uninstall()
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
        return isinstance(hook, Hook) and hook.experience is self.experience

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
        if self.experience.compilations is None:
            self.experience.traceable.install()
        for module in _unique(cuts.containers.values()):
            name = next(name for name, other in cuts.containers.items() if other is module)
            self._hook(module, Entering(self.experience, "container", name), Leaving(self.experience, "container"))
        for module in _unique(cuts.leaves.values()):
            self._hook(module, Entering(self.experience, "leaf"), Leaving(self.experience, "leaf"))
        for module in _unique(cuts.dear.values()):
            self._hook(module, Entering(self.experience, "dear"), Leaving(self.experience, "dear"))
        for name, segment in cuts.modules.items():
            self.model.get_submodule(name).register_forward_hook(Cutting(self.experience, segment))
        self._hook(self.model, Beginning(self.experience), Ending(self.experience))

    def _hook(self, module: nn.Module, before: Any, after: Any) -> None:
        # First before, last after: what others hook to the module happens inside, and again when it is repeated.
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)


def applied_to(model: nn.Module) -> Applied | None:
    """The plan on a model, also on a copy of one that has it."""
    experience = plan_on(model)
    return None if experience is None else Applied(model, experience)


def _forget_options(module: nn.Module, key: int) -> None:
    """torch keeps what it knows of a hook beside it."""
    for options in (
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ):
        options.pop(key, None)


def _unique(modules: Any) -> Iterator[nn.Module]:
    """Each module once."""
    return iter({id(module): module for module in modules}.values())
