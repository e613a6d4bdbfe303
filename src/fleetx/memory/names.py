"""Finds the outputs that a user names: modules, globs of them, and operations in a module's own forward."""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import nn

from fleetx.memory.dear import KINDS
from fleetx.memory.states import Segment
from fleetx.wrapped_names import modules_called

_GLOB = re.compile(r"[*?]")


@dataclass(eq=False)
class Cuts:
    """Where a model is cut, and which of its modules must be watched for it."""

    modules: dict[str, Segment] = field(default_factory=dict)
    operations: dict[str, Segment] = field(default_factory=dict)
    containers: dict[str, nn.Module] = field(default_factory=dict)  # run piece by piece
    leaves: dict[str, nn.Module] = field(default_factory=dict)  # run as a whole
    dear: dict[str, nn.Module] = field(default_factory=dict)  # their operations are dear
    expected: set[str] = field(default_factory=set)  # those named one by one: a forward should come to them

    def watched(self) -> list[nn.Module]:
        """All modules that have hooks."""
        return [*self.containers.values(), *self.leaves.values(), *self.dear.values()]

    def in_order(self) -> list[Segment]:
        """All segments, as they were listed."""
        return [*self.modules.values(), *self.operations.values()]


def find_cuts(model: nn.Module, segments: Sequence[Segment]) -> Cuts:
    """The outputs that the segments name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    cuts = Cuts()
    cut: dict[int, Segment] = {}
    for segment in segments:
        for name in _matched(segment.until, modules):
            if name in cuts.operations or name in cuts.modules:
                raise ValueError(
                    f"the output of {name!r} is named twice: by {segment.until!r} and before. Name it once."
                )
            _add_ancestors(cuts, name, modules)
            if not _GLOB.search(segment.until):
                cuts.expected.add(name)
            if ":" in name:
                cuts.operations[name] = replace(segment, until=name)
                continue
            first = cut.setdefault(id(modules[name]), replace(segment, until=name))
            if first.until == name:
                cuts.modules[name] = first
            elif replace(first, until=name) != replace(segment, until=name):
                raise ValueError(
                    f"{first.until!r} and {name!r} are one module, so its output cannot have two states. Name it once."
                )
            else:
                cuts.expected.discard(name)
    cuts.leaves = _leaves(cuts.containers, modules)
    cuts.dear = _dear_modules(segments, modules, cuts)
    return cuts


def _matched(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    """The outputs that a segment's `until` names."""
    owner, colon, _ = pattern.partition(":")
    matched = modules_called(owner, modules, lambda name, asked: bool(name or colon) and matches(name, asked))
    if not matched:
        raise ValueError(_unknown(owner, modules))
    called = [name for name in matched if _is_called(modules[name])]
    if not called:
        name = matched[0]
        raise ValueError(
            f"{name!r} is a {type(modules[name]).__name__}, which is never called and so has no output: name its "
            f"modules, for example '{name}.*'."
        )
    return [name + pattern[len(owner) :] for name in called]


def matches(name: str, pattern: str) -> bool:
    """Whether a glob names this module: `*` and `?` stay within one part of a dotted name, `**` does not."""
    return _expression(pattern).fullmatch(name) is not None


@lru_cache(maxsize=1024)  # a pattern is asked about for every module
def _expression(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\?)", glob)
    wild = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(wild.get(part, re.escape(part)) for part in parts))


def _add_ancestors(cuts: Cuts, name: str, modules: dict[str, nn.Module]) -> None:
    name, operation, _ = name.partition(":")
    if operation:
        cuts.containers[name] = modules[name]
    while name:
        name = name.rpartition(".")[0]
        cuts.containers[name] = modules[name]


def _leaves(containers: dict[str, nn.Module], modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The outermost modules in which nothing is cut; one that is never called itself stands for what is in it."""
    inner = {id(module) for module in containers.values()}
    open_names = set(containers)
    leaves: dict[str, nn.Module] = {}
    for name, module in modules.items():  # parents come before their children
        if name and id(module) not in inner and name.rpartition(".")[0] in open_names:
            if _is_called(module):
                leaves[name] = module
            else:
                open_names.add(name)
    return leaves


def called_children(module: nn.Module) -> list[nn.Module]:
    """A module's children, or what is in those that are never called themselves; each once."""
    found: dict[int, nn.Module] = {}
    for child in module.children():
        inside = [child] if _is_called(child) else called_children(child)
        found |= {id(one): one for one in inside}
    return list(found.values())


def _dear_modules(segments: Sequence[Segment], modules: dict[str, nn.Module], cuts: Cuts) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for segment in segments:
        for pattern in segment.dear if segment.save == "dear" else ():
            if pattern not in KINDS:
                found |= {name: modules[name] for name in _dear_matched(pattern, segment, modules, cuts)}
    return found


def _dear_matched(pattern: str, segment: Segment, modules: dict[str, nn.Module], cuts: Cuts) -> list[str]:
    """The modules that a name in a segment's `dear` means; refused if nothing would ever be saved for it."""
    matched = modules_called(pattern, modules, lambda name, asked: bool(name) and matches(name, asked))
    if not matched:
        raise ValueError(
            f"Segment.dear names kinds of operations ({', '.join(KINDS)}) or modules, and {pattern!r} is neither"
            + _near(pattern, [*KINDS, *modules])
        )
    called = [name for name in matched if _is_called(modules[name])]
    if not called:
        name = matched[0]
        raise ValueError(
            f"Segment.dear names {name!r}, a {type(modules[name]).__name__}, which is never called, so nothing would "
            f"be saved: name its modules, for example '{name}.*'."
        )
    ends = [name.partition(":")[0] for name in _matched(segment.until, modules)]
    if not any(_may_run_before(end, name, modules, cuts) for name in called for end in ends):
        inside = [name for name in modules if name and any(_lies_in(name, end) for end in ends)]
        raise ValueError(
            f"Segment.dear names modules inside the segment, and {pattern!r} is not inside the one that ends at "
            f"{segment.until!r}: another segment ends before"
            + _near(pattern, inside)
            + " Name modules inside it, or say dear of the segment that they are in."
        )
    return called


def _may_run_before(end: str, name: str, modules: dict[str, nn.Module], cuts: Cuts) -> bool:
    """Whether a module can be in the segment that ends at `end`: not where it is in a module that ends another one.

    In which order modules run is not known before a forward, so much else that saves nothing is taken. A module that
    has several names may be called by any of them.
    """
    names = [other for other, module in modules.items() if module is modules[name]]
    return any(all(_lies_in(end, cut) or not _lies_in(one, cut) for cut in cuts.modules) for one in names)


def _lies_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


def _is_called(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward  # a scripted one will not say


def _unknown(name: str, modules: dict[str, nn.Module]) -> str:
    return (
        f"recompute cuts the model at outputs of modules, and no module is called {name!r}"
        + _near(name, list(modules))
        + " fleetx.memory.outputs(model, *inputs) lists all outputs; globs such as 'encoder.layer.*' are allowed."
    )


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f" (near: {', '.join(near)})." if near else "."


def operation_name(container: str, function: Callable[..., Any], counts: dict[str, int]) -> str:
    """`container:function`, with a number from the second time on."""
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    number = counts.get(name, 0)
    counts[name] = number + 1
    return f"{container}:{name}" + (f"_{number}" if number else "")
