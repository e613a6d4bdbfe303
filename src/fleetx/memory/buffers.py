"""What modules hold beside their inputs: kept as it was before a forward, for when that is repeated.

While a module is repeated it sees copies of the buffers as they were, so that the real ones are written once; its
attributes are as they were too, and afterwards everything is as it was left. What a module changes is learned from its
first forward, parameters and buffers by value: batch norms write theirs behind autograd's back.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fleetx.memory import randomness
from fleetx.memory.attributes import Attributes, Plain, has_same_values, is_unchanged, put_back
from fleetx.memory.modes import Hooked, hooked_to, rehook
from fleetx.memory.statistics import is_counting
from fleetx.memory.tape import pointer_of, version_of


class Slot(NamedTuple):
    """Where a module keeps a parameter or a buffer."""

    owner: nn.Module
    kind: str  # _parameters or _buffers
    name: str

    @property
    def tensor(self) -> Tensor | None:
        """What is there now."""
        return getattr(self.owner, self.kind).get(self.name)

    @property
    def is_there(self) -> bool:
        """Whether it has not been deleted."""
        return self.name in getattr(self.owner, self.kind)

    def put(self, tensor: Tensor | None) -> None:
        """From now on it is this."""
        getattr(self.owner, self.kind)[self.name] = tensor

    def delete(self) -> None:
        """From now on there is nothing."""
        del getattr(self.owner, self.kind)[self.name]


@dataclass(eq=False)
class Constants:
    """Parameters and buffers that a forward does not change; in lists, since each forward asks for all of them."""

    slots: list[Slot]
    tensors: list[Tensor]
    versions: list[int]
    addresses: list[int]  # 0 where there is none

    @classmethod
    def of(cls, slots: list[Slot]) -> "Constants":
        """As they are."""
        held = [(slot, tensor) for slot in slots if (tensor := slot.tensor) is not None]
        tensors = [tensor for _, tensor in held]
        return cls([slot for slot, _ in held], tensors, list(map(version_of, tensors)), list(map(_address, tensors)))

    @property
    def are_unchanged(self) -> bool:
        """Whether nobody wrote to them, or gave them other memory as `weight.data = ...` does."""
        return list(map(version_of, self.tensors)) == self.versions and not self._moved()

    @property
    def are_the_same(self) -> bool:
        """Whether nobody wrote to them or put others in their place."""
        return self.are_unchanged and not self.replaced()

    def changed(self) -> list[Slot]:
        """Those that are not unchanged."""
        written = [v != version_of(tensor) for tensor, v in zip(self.tensors, self.versions, strict=True)]
        moved = self._moved()
        return [slot for slot, is_written in zip(self.slots, written, strict=True) if is_written or slot in moved]

    def replaced(self) -> list[tuple[Slot, Tensor]]:
        """Those in whose place there is something else now, with what was there."""
        return [
            (slot, tensor) for slot, tensor in zip(self.slots, self.tensors, strict=True) if slot.tensor is not tensor
        ]

    def _moved(self) -> list[Slot]:
        now = [t.data_ptr() if before else 0 for t, before in zip(self.tensors, self.addresses, strict=True)]
        if now == self.addresses:
            return []
        # Sharded ones lend their memory and take it back: then nothing can be said.
        both = zip(self.slots, now, self.addresses, strict=True)
        return [slot for slot, present, before in both if present not in (0, before)]


@dataclass(eq=False)
class Known:
    """What was seen of a module in its first forward."""

    changing: set[Slot] = field(default_factory=set)
    written: set[tuple[nn.Module, str]] = field(default_factory=set)  # attributes whose tensors are written to
    draws: bool = False  # from Python's or numpy's generator
    attributes: list[Plain | None] = field(default_factory=list)  # of the last forward


@dataclass(eq=False)
class Snapshot:
    """A module before a forward."""

    modules: list[nn.Module]  # itself and all in it
    copies: list[tuple[Slot, Tensor]]
    constants: Constants
    attributes: Attributes
    random: Any
    weights: list[tuple[Slot, Tensor]] = field(default_factory=list)  # copies, as long as nothing is known
    hooked: Hooked = field(default_factory=list)  # after the forward: a hook may have taken itself off

    def require_same(self) -> None:
        """Raise if the module cannot be as it was any more."""
        present = modules_of(self.modules[0])
        if present != self.modules and not {*self.modules}.issubset(present):  # a forward may make more of them
            raise RuntimeError(
                f"a module was taken out of a {type(self.modules[0]).__name__}, or exchanged, between the forward and "
                "the backward, so the segment cannot be repeated as it was. Do that after the backward; or leave this "
                "module out of recompute."
            )
        if not self.constants.are_unchanged:
            slot = self.constants.changed()[0]
            raise RuntimeError(
                f"{slot.name!r} of a {type(slot.owner).__name__} was changed between the forward and the backward, so "
                "the segment cannot be repeated as it was. Change it inside of forward, or after the backward; or "
                "leave this module out of recompute."
            )

    @contextmanager
    def restored(self) -> Iterator[list[Tensor]]:
        """Inside, the module is as it was, with copies of its buffers, which are given; then as it is now."""
        self.require_same()
        replaced = [(slot, before) for slot, before in self.constants.replaced() if pointer_of(before) is not None]
        held = {slot: slot.tensor for slot, _ in self.copies + replaced}
        deleted = [slot for slot in held if not slot.is_there]
        attributes = [(vars(module), vars(module).copy()) for module in self.modules]
        random = None if self.random is None else randomness.python_state()
        shared: dict[int, Tensor] = {}
        hooked: Hooked = []
        try:
            for (slot, _), copy in zip(self.copies, _copies([copy for _, copy in self.copies]), strict=True):
                slot.put(shared.setdefault(id(held[slot]), copy))
            for slot, before in replaced:
                slot.put(before)
            self.attributes.put_back()
            if self.random is not None:
                randomness.restore_python(self.random)
            hooked = rehook(self.hooked)
            yield list(shared.values())
        finally:
            rehook(hooked)
            for slot, tensor in held.items():
                slot.put(tensor)
            for slot in deleted:
                slot.delete()
            for now, before in attributes:
                if not is_unchanged(now, before):
                    put_back(now, before, {})
            if random is not None:
                randomness.restore_python(random)


class Watch:
    """Knows what modules change in a forward."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}

    def before(self, module: nn.Module) -> Snapshot:
        """The module as it is, as far as a forward may change it."""
        modules = modules_of(module)
        buffers, parameters = _slots(modules, "_buffers"), _slots(modules, "_parameters")
        known = self._known.get(_key(modules))
        if known is None:
            attributes = Attributes.of(modules, lambda _owner, _name: True, [])
            constants = Constants.of(buffers + parameters)
            there = zip(constants.slots, constants.addresses, strict=True)
            weights = _copied([slot for slot, address in there if slot.kind == "_parameters" and address])
            return Snapshot(modules, _copied(buffers), constants, attributes, randomness.python_state(), weights)
        copied = {slot: None for slot in buffers if slot in known.changing or is_counting(slot.owner)}
        constants = Constants.of([slot for slot in buffers if slot not in copied] + parameters)
        attributes = Attributes.of(modules, lambda owner, name: (owner, name) in known.written, known.attributes)
        random = randomness.python_state() if known.draws else None
        return Snapshot(modules, _copied(list(copied)), constants, attributes, random)

    def after(self, snapshot: Snapshot) -> Snapshot | None:
        """What must be kept of it; None if something changed that had not been seen to change before."""
        snapshot.hooked = hooked_to(snapshot.modules)
        key = _key(snapshot.modules)
        known = self._known.get(key)
        if known is None and _has_same_parameters(snapshot):
            self._known[key] = known = _learned(snapshot)
            others = [slot for slot, _ in snapshot.copies if slot not in known.changing]
            snapshot.copies = [(slot, copy) for slot, copy in snapshot.copies if slot in known.changing]
            snapshot.constants = Constants.of(others + _slots(snapshot.modules, "_parameters"))
            snapshot.attributes.drop_copies(but=known.written)
            snapshot.random = snapshot.random if known.draws else None
            snapshot.weights = []
            return snapshot
        if known is not None and snapshot.constants.are_the_same and snapshot.attributes.is_complete:
            return snapshot
        self._known.pop(key, None)  # learn anew
        return None


def modules_of(module: nn.Module) -> list[nn.Module]:
    """The module and all in it, each once; several times faster than torch's own way."""
    found = {module: None}
    waiting = [module]
    while waiting:
        for inner in waiting.pop()._modules.values():
            if inner is not None and inner not in found:
                found[inner] = None
                waiting.append(inner)
    return list(found)


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks of others are called after it, or after a module in it."""
    hooks = (hook for part in modules_of(module) for hook in part._forward_hooks.values())
    return any(not getattr(hook, "is_of_plan", False) for hook in hooks)


def tensors_of(modules: Iterable[nn.Module], *kinds: str) -> list[Tensor]:
    """Parameters or buffers of these modules; those that are shared may be there several times."""
    held = (getattr(one, kind).values() for kind in kinds for one in modules)
    return [tensor for tensors in held for tensor in tensors if tensor is not None]


def _has_same_parameters(snapshot: Snapshot) -> bool:
    """By value too: `weight.data.mul_(...)` leaves no other trace."""
    differ = [*snapshot.constants.changed(), *(slot for slot, _ in snapshot.constants.replaced())]
    if any(slot.kind == "_parameters" for slot in differ):
        return False
    return all(_is_same(slot.tensor, copy) for slot, copy in snapshot.weights)


def _learned(snapshot: Snapshot) -> Known:
    constants = snapshot.constants
    stayed = {*constants.slots} - {*constants.changed()} - {slot for slot, _ in constants.replaced()}
    return Known(
        {slot for slot, copy in snapshot.copies if slot not in stayed or not _is_same(slot.tensor, copy)},
        snapshot.attributes.written(),
        randomness.python_state() != snapshot.random,
    )


def _slots(modules: list[nn.Module], kind: str) -> list[Slot]:
    return [Slot(one, kind, name) for one in modules for name, held in getattr(one, kind).items() if held is not None]


def _address(tensor: Tensor) -> int:
    try:
        return 0 if is_lazy(tensor) else tensor.data_ptr()
    except RuntimeError:  # of what consists of other tensors
        return 0


def _key(modules: list[nn.Module]) -> tuple[int, tuple[bool, ...]]:
    return id(modules[0]), tuple(one.training for one in modules)


def _is_same(tensor: Tensor | None, copy: Tensor) -> bool:
    return tensor is not None and has_same_values(tensor, copy)


def _copied(slots: list[Slot]) -> list[tuple[Slot, Tensor]]:
    return list(zip(slots, _copies([slot.tensor for slot in slots]), strict=True))


def _copies(tensors: list[Any]) -> list[Tensor]:
    """Copies of many small tensors in few kernels."""
    copies = [torch.empty_like(t) if t.layout is torch.strided else t.detach().clone() for t in tensors]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.layout is torch.strided:
            groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    for indices in groups.values():
        torch._foreach_copy_([copies[i] for i in indices], [tensors[i].detach() for i in indices])
    return copies
