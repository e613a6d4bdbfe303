"""Finds the outputs that a user names: modules, globs of them, and operations in a module's own forward."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from fleetx.memory.dear import KINDS
from fleetx.memory.states import Segment


@dataclass(eq=False)
class Cuts:
    """Where a model is cut, and which of its modules must be watched for it."""

    modules: dict[str, Segment] = field(default_factory=dict)
    operations: dict[str, Segment] = field(default_factory=dict)
    containers: dict[str, nn.Module] = field(default_factory=dict)  # run piece by piece
    leaves: dict[str, nn.Module] = field(default_factory=dict)  # run as a whole
    dear: dict[str, nn.Module] = field(default_factory=dict)  # their operations are dear

    def in_order(self) -> list[Segment]:
        """All segments, as they were listed."""
        return [*self.modules.values(), *self.operations.values()]


def find_cuts(model: nn.Module, segments: Sequence[Segment]) -> Cuts:
    """The outputs that the segments name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    cuts = Cuts()
    for segment in segments:
        if ":" in segment.until:
            owner = segment.until.partition(":")[0]
            if owner not in modules:
                raise ValueError(_unknown(owner, modules))
            cuts.operations[segment.until] = segment
            cuts.containers[owner] = modules[owner]
            _add_ancestors(cuts, owner, modules)
            continue
        matched = [name for name in modules if name and matches(name, segment.until)]
        if not matched:
            raise ValueError(_unknown(segment.until, modules))
        for name in matched:
            if name in cuts.modules:
                raise ValueError(
                    f"the output of {name!r} is named twice: by {segment.until!r} and before. Name it once."
                )
            cuts.modules[name] = replace(segment, until=name)
            _add_ancestors(cuts, name, modules)
    for name in cuts.modules:
        if not _is_called(modules[name]):
            raise ValueError(
                f"{name!r} is a {type(modules[name]).__name__}, which is never called and so has no output: name its "
                f"modules, for example '{name}.*'."
            )
    cuts.leaves = _leaves(cuts.containers, modules)
    cuts.dear = _dear_modules(segments, modules)
    return cuts


def matches(name: str, pattern: str) -> bool:
    """Whether a glob names this module: `*` and `?` stay within one part of a dotted name, `**` does not."""
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    wild = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.fullmatch("".join(wild.get(part, re.escape(part)) for part in parts), name) is not None


def _add_ancestors(cuts: Cuts, name: str, modules: dict[str, nn.Module]) -> None:
    while name:
        name = name.rpartition(".")[0]
        cuts.containers[name] = modules[name]


def _leaves(containers: dict[str, nn.Module], modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The outermost modules in which nothing is cut."""
    inner = {id(module) for module in containers.values()}
    leaves: dict[str, nn.Module] = {}
    for name, module in modules.items():
        parent = name.rpartition(".")[0]
        if name and id(module) not in inner and parent in containers:
            leaves[name] = module
    return leaves


def _dear_modules(segments: Sequence[Segment], modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for pattern in {name for segment in segments if segment.save == "dear" for name in segment.dear}:
        if pattern in KINDS:
            continue
        matched = [name for name in modules if name and matches(name, pattern)]
        if not matched:
            raise ValueError(
                f"Segment.dear names kinds of operations ({', '.join(KINDS)}) or modules, and {pattern!r} is neither"
                + _near(pattern, [*KINDS, *modules])
            )
        found |= {name: modules[name] for name in matched}
    return found


def _is_called(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def _unknown(name: str, modules: dict[str, nn.Module]) -> str:
    return (
        f"recompute cuts the model at outputs of modules, and no module is called {name!r}"
        + _near(name, list(modules))
        + " fleetx.memory.outputs(model, batch) lists all outputs; globs such as 'encoder.layer.*' are allowed."
    )


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f" (near: {', '.join(near)})." if near else "."
