"""Buffers of models as they were when a window began: a window that is skipped leaves them as it leaves weights."""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fleetx.comm.buckets import MIB
from fleetx.optim.sharded import local

LARGE = 16 * MIB
"""Buffers above this (caches, quantised weights) are kept from the window on in which they were seen to change."""


class _Place(NamedTuple):
    name: str
    module: nn.Module
    leaf: str

    @property
    def buffer(self) -> Tensor | None:
        held = self.module._buffers[self.leaf]
        return None if held is None else local(held)


class _Kept(NamedTuple):
    """Buffers of one kind, side by side in one tensor."""

    places: list[_Place]
    shapes: list[torch.Size]
    values: Tensor

    def pieces(self) -> list[Tensor]:
        """The buffers one by one, as views."""
        return _parted(self.values, self.shapes)


class WindowBuffers:
    """Keeps the buffers of some models from the start of each window, and puts them back if it is skipped.

    A window begins with the first training forward after the last one: what was loaded or estimated before that stays,
    and so does what is loaded after a forward that was not trained on. A forward that cannot be seen (inside of
    torch.compile, or of a part alone) is taken to follow the last window, or what was loaded since, directly.
    """

    def __init__(self, models: Sequence[nn.Module] = ()) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._kept: list[_Kept] = []
        # Of large buffers: what was seen of each, and those that have changed.
        self._seen: dict[tuple[int, str], tuple[weakref.ref[Tensor], int]] = {}
        self._changing: set[tuple[int, str]] = set()
        # The kept buffers of each module, once one was loaded: views, by the module's id and the buffer's name.
        self._pieces: dict[int, dict[str, Tensor]] | None = None
        self._is_between = True
        self._is_held = False
        self.watch(models)

    def __reduce__(self) -> Any:
        return WindowBuffers, ()  # a copy of an optimizer knows no models

    def watch(self, models: Sequence[nn.Module]) -> None:
        """Keep the buffers of these models too, from now on."""
        known = [reference() for reference in self._models]
        for model in [model for model in models if not any(model is one for one in known)]:
            self._models.append(weakref.ref(model))
            if any(True for _ in model.buffers()):
                model.register_forward_pre_hook(_Forward(self))
            for module in model.modules():
                if any(True for _ in module.buffers(recurse=False)):
                    module.register_load_state_dict_post_hook(_Loading(self))
        self.keep()

    def begin(self) -> None:
        """A training forward: if it is the first of its window, the buffers are kept as they are now."""
        if self._is_between:
            self.keep()
            self._is_between = False

    def note_begin(self) -> None:
        """The window holds a micro-batch: forwards from here on belong to it."""
        self._is_between, self._is_held = False, True

    def note_loaded(self, module: nn.Module) -> None:
        """Its buffers were loaded: what ran before that belongs to no window, unless one holds micro-batches."""
        if self._is_held:
            return
        if not self._is_between:
            self.end()
        elif not self._keep_those_of(module):
            self.keep()

    def end(self) -> None:
        """The window is over, and what had to be put back has been."""
        self.keep()
        self._is_between, self._is_held = True, False

    def state_dict(self, copy: bool = True) -> dict[str, Tensor]:
        """The buffers as they were when the window in progress began, by name."""
        pairs = [pair for kept in self._kept for pair in zip(kept.places, kept.pieces(), strict=True)]
        return {place.name: piece.clone() if copy else piece for place, piece in pairs}

    def live(self) -> dict[str, Tensor]:
        """All buffers as they are now, by name, also those that are not kept."""
        return {place.name: buffer for place in self._places() if (buffer := place.buffer) is not None}

    def load_state_dict(self, saved: Mapping[str, Tensor] | None) -> None:
        """Continue a window that began with these; None if none is in progress."""
        self.keep()
        self._is_between, self._is_held = saved is None, saved is not None
        if saved is not None:
            live = self.live()
            known = [place for place in self._places() if place.name in saved and place.name in live]
            self._kept = _grouped([(place, saved[place.name].to(live[place.name])) for place in known])
            self._pieces = None

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the buffers as they are."""
        found = [(place, buffer) for place in self._places() if (buffer := place.buffer) is not None]
        self._kept = _grouped([pair for pair in found if _can_be_written(pair[1]) and self._is_kept(pair[0])])
        self._pieces = None

    @torch.no_grad()
    def _keep_those_of(self, module: nn.Module) -> bool:
        """Remember one module's buffers; false if they are not all kept. A state dict is loaded module by module."""
        if self._pieces is None:
            self._pieces = {}
            for kept in self._kept:
                for place, piece in zip(kept.places, kept.pieces(), strict=True):
                    self._pieces.setdefault(id(place.module), {})[place.leaf] = piece
        pieces = self._pieces.get(id(module), {})
        live = {leaf: local(buffer) for leaf, buffer in module._buffers.items() if buffer is not None}
        if any(leaf not in pieces or not _fits(buffer, pieces[leaf]) for leaf, buffer in live.items()):
            return False
        for leaf, buffer in live.items():
            pieces[leaf].copy_(buffer)
        return True

    @torch.no_grad()
    def restore(self, unless: Tensor | None = None) -> None:
        """Put the buffers back; with `unless` only where it is not true, which the device finds by itself."""
        for kept in self._kept:
            values = kept.values
            buffers = [buffer for place in kept.places if (buffer := place.buffer) is not None]
            fitting = [buffer.shape for buffer in buffers] == kept.shapes and all(_alike(b, values) for b in buffers)
            if unless is not None and (not fitting or values.device != unless.device):
                if unless.item():  # the host has to know, where a buffer was replaced by another kind
                    continue
            elif unless is not None:
                values = torch.where(unless, _joined(buffers), values)
            pieces = _parted(values, kept.shapes)
            if fitting:
                torch._foreach_copy_(buffers, pieces)
                continue
            for place, piece in zip(kept.places, pieces, strict=True):
                place.module._buffers[place.leaf] = piece.clone()

    def _places(self) -> Iterator[_Place]:
        seen: set[int] = set()
        for number, model in enumerate(reference() for reference in self._models):
            for path, module in [] if model is None else model.named_modules():
                for leaf, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        yield _Place(f"{number}/{path}.{leaf}", module, leaf)

    def _is_kept(self, place: _Place) -> bool:
        buffer = place.module._buffers[place.leaf]
        if buffer is None or buffer.numel() * buffer.itemsize <= LARGE:
            return buffer is not None
        key = (id(place.module), place.leaf)
        reference, version = self._seen.setdefault(key, (weakref.ref(buffer), buffer._version))
        if reference() is not buffer or buffer._version != version:
            self._changing.add(key)
        return key in self._changing


class _Forward:
    """Tells of training forwards. A copy of the model has one that tells nobody."""

    def __init__(self, buffers: WindowBuffers | None = None) -> None:
        self._buffers = None if buffers is None else weakref.ref(buffers)

    def __reduce__(self) -> Any:
        return _Forward, ()

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        buffers = None if self._buffers is None else self._buffers()
        if buffers is not None:
            buffers.begin()


class _Loading:
    """Reports loaded state dicts to the window's buffers. In a copy of the model it does nothing."""

    def __init__(self, buffers: WindowBuffers | None = None) -> None:
        self._buffers = None if buffers is None else weakref.ref(buffers)

    def __reduce__(self) -> Any:
        return _Loading, ()

    def __call__(self, module: nn.Module, _incompatible_keys: Any) -> None:
        buffers = None if self._buffers is None else self._buffers()
        if buffers is not None:
            buffers.note_loaded(module)


def _can_be_written(buffer: Tensor) -> bool:
    """Not one without memory, nor an expanded one, whose entries share it: nothing can change these in place."""
    if buffer.layout != torch.strided or buffer.is_meta:
        return False
    return not any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))


def _fits(buffer: Tensor, piece: Tensor) -> bool:
    return buffer.shape == piece.shape and _alike(buffer, piece)


def _grouped(pairs: Sequence[tuple[_Place, Tensor]]) -> list[_Kept]:
    kinds: dict[Any, list[tuple[_Place, Tensor]]] = {}
    for place, value in pairs:
        kinds.setdefault((value.dtype, value.device), []).append((place, value))
    return [
        _Kept([place for place, _ in same], [value.shape for _, value in same], _joined([value for _, value in same]))
        for same in kinds.values()
    ]


def _parted(values: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = values.split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _joined(buffers: Sequence[Tensor]) -> Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


def _alike(buffer: Tensor, values: Tensor) -> bool:
    return buffer.dtype == values.dtype and buffer.device == values.device and _can_be_written(buffer)
