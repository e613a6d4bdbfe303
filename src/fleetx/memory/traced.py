"""What a plan does inside of the user's own torch.compile: segments become torch's checkpoints in the compiled graph.

A compiler traces what modules call. So a module that is a segment, and an `nn.Sequential` that holds several, has a
`forward` that calls its own one inside of a checkpoint while it is traced; elsewhere it only calls its own one.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fleetx.memory.dear import is_dear, kinds_of
from fleetx.memory.names import Cuts
from fleetx.memory.states import Segment

REMEDY = "Let the plan compile what runs between the cuts: memory.apply(..., compile=True), or strategy.compile."


class Siblings(NamedTuple):
    """Some children of a Sequential, one after the other, that are a segment."""

    start: int
    stop: int
    segment: Segment


@dataclass
class Traceable:
    """The segments of a plan as a compiler can see them.

    Found from names and kinds of modules alone, which are taken to run in the order in which they are registered.
    """

    modules: list[tuple[nn.Module, Segment]] = field(default_factory=list)
    sequentials: dict[nn.Module, list[Siblings]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)  # modules that the plan would recompute, and no checkpoint holds
    refused: str = ""  # why the plan cannot be traced

    @classmethod
    def of(cls, cuts: Cuts) -> "Traceable":
        """Of a plan."""
        made = cls()
        if reason := _why_refused(cuts):
            made._refuse(reason)
        if cuts.containers:  # else everything is kept
            made._walk("", cuts.containers[""], cuts, [])
        return made

    def install(self) -> None:
        """Give the modules the forwards that a compiler sees."""
        for module, segment in self.modules:
            _install(module, partial(_segment, module, vars(module).get("forward"), segment))
        for container, runs in self.sequentials.items():
            _install(container, partial(_runs, container, vars(container).get("forward"), tuple(runs)))

    def uninstall(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Take them away again, from these modules or from all."""
        for module in [*(module for module, _ in self.modules), *self.sequentials] if modules is None else modules:
            given = vars(module).get("forward")
            if not isinstance(given, partial) or given.func not in (_segment, _runs):
                continue  # somebody gave it another one since
            own = given.args[1]
            if own is None:
                del module.forward
            else:
                module.forward = own

    def _walk(self, name: str, container: nn.Module, cuts: Cuts, waiting: list[str]) -> None:
        """Go through a container's modules; `waiting` are those since the last cut."""
        start, waiting_before = 0, len(waiting)
        for place, (own, child) in enumerate(container._modules.items()):
            full = f"{name}.{own}" if name else own
            segment = cuts.modules.get(full)
            if child is None:
                continue
            if full in cuts.containers:
                if segment is not None:
                    self._refuse(f"{full!r} ends a segment and holds the ends of others")
                self._walk(full, child, cuts, waiting)
                start, waiting_before = place + 1, len(waiting)
            elif segment is None:
                waiting.append(full)
            else:
                is_run = type(container).forward is nn.Sequential.forward
                self._add(container if is_run else None, Siblings(start, place + 1, segment), child)
                outside = waiting[:waiting_before] if is_run else waiting
                self._keep([] if segment.save == "everything" else outside, child, cuts)
                waiting.clear()
                start, waiting_before = place + 1, 0

    def _add(self, sequential: nn.Module | None, run: Siblings, module: nn.Module) -> None:
        if run.segment.save == "everything":
            return
        if sequential is None:
            self.modules.append((module, run.segment))
        else:
            self.sequentials.setdefault(sequential, []).append(run)

    def _keep(self, names: list[str], module: nn.Module, cuts: Cuts) -> None:
        """These run before a module that is cut, in its segment. Another one of its kind is a block that is not cut."""
        self.kept += names
        for name in names:
            if name in cuts.leaves and type(cuts.leaves[name]) is type(module):
                self._refuse(f"{name!r} is not cut, as others of its kind are")

    def _refuse(self, reason: str) -> None:
        self.refused = self.refused or f"{reason}. {REMEDY}".rstrip(".")


def warn_of_kept(names: str) -> None:
    """Warn, when a compiler traces a plan, of modules whose activations it cannot recompute."""
    warnings.warn(
        f"compiled from outside, the model keeps what {names} computes, which the plan would recompute: a compiler "
        f"sees segments that are one module, or a run of a Sequential's. {REMEDY}",
        stacklevel=2,
    )


# All that torch.compiler.assume_constant_result does, which imports the compiler: that takes seconds.
warn_of_kept._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _why_refused(cuts: Cuts) -> str:
    on_host = [segment.until for segment in cuts.in_order() if segment.home == "host"]
    if on_host:
        return f"home='host' was asked for until {', '.join(map(repr, on_host))}"
    if cuts.operations:
        return f"{', '.join(map(repr, cuts.operations))} cuts inside of a module's own forward"
    if cuts.dear:
        return f"dear operations are known by kind only there, not by modules such as {next(iter(cuts.dear))!r}"
    return ""


def _install(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = update_wrapper(forward, type(module).forward)


def _segment(module: nn.Module, own: Any, segment: Segment, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that is a segment."""
    function = own if own is not None else partial(type(module).forward, module)
    if not _is_traced():
        return function(*args, **kwargs)
    return _checkpointed(partial(function, **kwargs), segment, args)


def _runs(container: nn.Module, own: Any, runs: tuple[Siblings, ...], /, x: Any) -> Any:
    """The forward of a Sequential that holds segments."""
    if not _is_traced():
        return type(container).forward(container, x) if own is None else own(x)
    children, place = list(container._modules.values()), 0
    for run in runs:
        x = _through(children[place : run.start], x)
        x = _checkpointed(partial(_through, children[run.start : run.stop]), run.segment, (x,))
        place = run.stop
    return _through(children[place:], x)


def _is_traced() -> bool:
    """Whether a compiler traces a forward that will have a backward."""
    return torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled() and not torch.compiler.is_exporting()


def _through(modules: list[Any], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def _checkpointed(function: Callable[..., Any], segment: Segment, args: tuple[Any, ...]) -> Any:
    kinds = kinds_of(segment.dear) if segment.save == "dear" else ()
    return checkpoint(function, *args, use_reentrant=False, context_fn=partial(_contexts, kinds))


def _contexts(kinds: tuple[str, ...]) -> Any:
    """What torch asks for while it traces a checkpoint's backward; in eager code it would ask in each forward.

    Eager checkpoints would count batch statistics twice, and `backend="eager"` draws other random numbers.
    """
    if torch._C._len_torch_dispatch_stack() == 0:
        raise RuntimeError(
            "a model with a plan is compiled from outside, and a segment could not be compiled into one graph with its "
            f"backward: it breaks the graph, or the backend is for debugging only (backend='eager'). {REMEDY}"
        )
    return create_selective_checkpoint_contexts(partial(_policy, kinds))


def _policy(kinds: tuple[str, ...], _context: Any, function: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    save = bool(kinds) and is_dear(kinds, function, args)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
