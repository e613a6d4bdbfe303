"""Segments by themselves: finds where to cut a model that was never seen before.

A model of many layers is usually a stack of blocks of one class, perhaps several stacks, perhaps stacks in stages. One
small forward shows which modules run, in which order, what they save for the backward, and what depends on what. Then:

1. A *family* is all modules of one kind (class; for `nn.Sequential` also its children's classes) that run once, are
   made of modules themselves, and build on each other: experts beside each other are no stack.
2. The family that saves most is chosen. If another one fills its members almost entirely (the blocks in the stages of
   a CNN), that one is taken in its place. What is left of the model is searched for further families.
3. The output of each member is a cut; so is what comes before a member, if it saves as much as half a member does
   (the stem of a CNN).
4. Without any family the forward is cut where the saved bytes divide evenly, before modules with weights.

Where one block is too large for the memory there is, each is cut in two: after a module inside of it with which about
half of its bytes have been saved, and past which nothing goes by a shortcut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from fleetx.memory import applied_to
from fleetx.memory.refusing import HAS_A_PLAN
from fleetx.planner.feeding import Feeding
from fleetx.planner.tracing import OTHER_SEED, Call, Trace, dropped, trace
from fleetx.slicing import Batch

_RECURRENT = (nn.RNNBase,)
_FILLS = 0.7  # part of its owner's saved bytes that a family inside must have to be taken in its place
_WORTH = 0.08  # part of all saved bytes that a further family must have
_STEM = 0.5  # of a member's saved bytes
_PIECES = 8  # into which a model without blocks is cut
_OFF_MIDDLE = 0.25  # of a block's saved bytes, by which its parts may differ from halves


@dataclass(frozen=True)
class Family:
    """Modules of one kind that build on each other."""

    kind: Any
    members: tuple[Call, ...]

    @property
    def saved(self) -> int:
        """Bytes that its members save for the backward."""
        return sum(member.saved for member in self.members)


def find_blocks(feeding: Feeding, sample: Batch) -> list[str]:
    """Names of modules to cut at, in the order in which they end. The model is left as it was."""
    return next(ways_to_cut(feeding, sample))


def ways_to_cut(feeding: Feeding, sample: Batch) -> Iterator[list[str]]:
    """The model's blocks; then, for those who have no room for a whole one, each block in two parts."""
    if applied_to(feeding.model) is not None:
        raise ValueError(HAS_A_PLAN)
    seen = trace(feeding, sample)
    cuts = _found(seen)
    names = [call.name for call in cuts]
    others = [call.name for call in _found(trace(feeding, sample, seed=OTHER_SEED))]
    if {*names} != {*others}:
        raise ValueError(dropped(sorted({*names} ^ {*others})[0]))
    if names != others:
        place = next(place for place, name in enumerate(names) if others[place] != name)
        raise ValueError(
            f"a model is planned whose blocks run in one order, and {names[place]!r} and {others[place]!r} changed "
            "places from one forward to another. Keep them in one order while the plan is made."
        )
    yield names
    finer = [part for call in cuts for part in (*_middle(seen, call), call)]
    if len(finer) > len(cuts):
        yield [call.name for call in finer]


def _found(seen: Trace) -> list[Call]:
    families = _chosen(seen)
    return _cuts(seen, families) if families else _pieces(seen)


def _chosen(seen: Trace) -> list[Family]:
    """The families to cut at."""
    chosen: list[Family] = []
    total = seen.saved
    scope = list(seen.once)
    while True:
        families = [family for family in _families(seen, scope) if family.saved >= _WORTH * total]
        if not families:
            return chosen
        # Of those that save alike the outermost: its inside is looked at next.
        best = max(families, key=lambda family: (family.saved, -family.members[0].depth))
        finest = _finest(seen, best)
        chosen.append(finest)
        scope = [call for call in scope if not any(_related(call, member) for member in finest.members)]


def _families(seen: Trace, scope: Sequence[Call]) -> list[Family]:
    kinds: dict[Any, list[Call]] = {}
    for call in scope:
        if _is_composite(call.module) and not _is_of_weight(call):
            kinds.setdefault(_kind(call.module), []).append(call)
    families = []
    for kind, members in kinds.items():
        outermost = [one for one in members if not any(_inside(one, other) for other in members)]
        if len(outermost) > 1 and _is_stack(seen, outermost):
            families.append(Family(kind, tuple(outermost)))
    return families


def _finest(seen: Trace, family: Family) -> Family:
    """The family itself, or one inside of its members that makes up almost all of them."""
    inside = [call for call in seen.once if any(_inside(call, member) for member in family.members)]
    for inner in sorted(_families(seen, inside), key=lambda one: (-one.saved, one.members[0].depth)):
        if inner.saved >= _FILLS * family.saved and len(inner.members) > len(family.members):
            return _finest(seen, inner)
    return family


def _is_composite(module: nn.Module) -> bool:
    if isinstance(module, _RECURRENT):
        return True
    parts = [name for name, _ in module.named_children() if name != "parametrizations"]
    return bool(parts) and any(True for _ in module.parameters())


def _is_of_weight(call: Call) -> bool:
    """Whether it runs inside of what computes a weight: nobody thinks of that as a block."""
    return "parametrizations" in call.name.split(".")


def _kind(module: nn.Module) -> Any:
    if isinstance(module, nn.Sequential):
        return (type(module), tuple(_kind(child) for child in module))
    return type_before_parametrizations(module)  # each that has some is of a class of its own


def _is_stack(seen: Trace, members: Sequence[Call]) -> bool:
    """Whether most of them build on the one before."""
    pairs = list(pairwise(members))
    return sum(seen.depends(later, earlier) for earlier, later in pairs) * 2 >= len(pairs)


def _inside(call: Call, other: Call) -> bool:
    return call is not other and call.name.startswith(other.name + ".")


def _related(call: Call, member: Call) -> bool:
    return call is member or _inside(call, member) or _inside(member, call) or member.name == ""


def _cuts(seen: Trace, families: Sequence[Family]) -> list[Call]:
    """The members' outputs, and those before a member if much was saved there."""
    members = sorted((member for family in families for member in family.members), key=lambda call: call.ends)
    names = {member.name for member in members}
    cuts: list[Call] = []
    at = 0  # bytes saved up to the last cut
    for member in members:
        before = member.saved_before
        if before - at >= _STEM * member.saved:
            stem = _last_before(seen, member, names)
            if stem is not None and (not cuts or stem.ends > cuts[-1].ends):
                cuts.append(stem)
        cuts.append(member)
        at = member.saved_before + member.saved
    return cuts


def _middle(seen: Trace, block: Call) -> list[Call]:
    """The module inside of a block that ends about where half of its bytes have been saved; none if there is none."""

    def from_middle(call: Call) -> float:
        return abs((call.saved_before + call.saved - block.saved_before) / block.saved - 0.5)

    inside = [call for call in seen.once if _inside(call, block)] if block.saved else []
    fair = [call for call in inside if from_middle(call) <= _OFF_MIDDLE]
    # Not inside of a shortcut: both parts would read what goes around, and if one of them had it on the host and the
    # other on the device it would be in both places, which nobody counts.
    necks = [call for call in fair if seen.is_neck(block, call)]
    return sorted(necks, key=lambda call: (call.depth, round(from_middle(call), 3)))[:1]


def _last_before(seen: Trace, member: Call, members: set[str]) -> Call | None:
    """The module that ended last before a member began, the outermost one."""
    earlier = [
        call
        for call in seen.once
        if call.ends < member.begins
        and call.name not in members
        and not any(call.name.startswith(name + ".") for name in members)
        and not any(name.startswith(call.name + ".") for name in members)
    ]
    return max(earlier, key=lambda call: call.ends, default=None)


def _pieces(seen: Trace) -> list[Call]:
    """Cuts of a model without blocks: about equal in what they save, each before a module with weights."""
    leaves = sorted((call for call in seen.leaves() if not _is_of_weight(call)), key=lambda call: call.ends)
    if len(leaves) < 3:
        return []
    possible = []
    for call, following in pairwise(leaves):
        # What has weights begins something; an activation or a norm belongs to what is before it.
        if any(p.dim() > 1 for p in following.module.parameters()):
            possible.append(call)
    target = seen.saved / _PIECES
    cuts: list[Call] = []
    at = 0.0
    for call in possible:
        end = call.saved_before + call.saved
        if end - at >= target * 0.999:
            cuts.append(call)
            at = end
    return cuts
