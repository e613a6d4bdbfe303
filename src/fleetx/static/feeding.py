"""What a feed must hold: arrays by name, as tensors on the program's device."""

import difflib
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetx.notices import shown
from fleetx.static.program import Program


@dataclass(frozen=True)
class Inputs:
    """The names that a program knows, those that it cannot do without, and whether it takes others too."""

    names: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    takes_others: bool = False

    def check(self, feed: Any) -> dict[str, Any]:
        """The feed without entries that are None, or an error that names what is wrong with it."""
        if not isinstance(feed, Mapping):
            raise TypeError(
                f"a feed is a dict from names to arrays, not a {type(feed).__name__}: "
                f"feed={{{', '.join(f'{name!r}: ...' for name in self.names)}}}."
            )
        for name in feed:
            if name not in self.names and not self.takes_others:
                near = difflib.get_close_matches(str(name), self.names, n=1)
                raise ValueError(
                    f"the program has no input {name!r}"
                    + (f", do you mean {near[0]!r}?" if near else ".")
                    + f" It takes {', '.join(self.names)}."
                )
        given = {name: value for name, value in feed.items() if value is not None}
        missing = [name for name in self.required if name not in given]
        if missing:
            raise ValueError(
                f"the program needs {', '.join(self.required)}, but the feed has "
                f"{', '.join(given) if given else 'nothing'}: add {', '.join(missing)}."
            )
        return given


def inputs_of(program: Program) -> Inputs:
    """What the feed of a program may hold. Where the user computes the loss, only the user knows."""
    if program.compute is not None:
        return Inputs(takes_others=True)
    parameters = inspect.signature(program.require_model().forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = getattr(program.model, "inputs", None)
    return Inputs(
        names=tuple(names) if names else tuple(p.name for p in named),
        required=tuple(p.name for p in named if p.default is p.empty),
        takes_others=not names and any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def as_batch(given: Mapping[str, Any], device: torch.device, on_host: Collection[str] = ()) -> dict[str, Tensor]:
    """The arrays as tensors on the device; those that the model reads `on_host` stay where they are."""
    tensors = {name: _as_tensor(name, value) for name, value in given.items()}
    # Copies: a model that works in place on its input must not overwrite the user's array.
    batch = {
        name: tensor.clone() if name in on_host else tensor.to(device, non_blocking=True, copy=True)
        for name, tensor in tensors.items()
    }
    sized = [tensor for tensor in batch.values() if tensor.dim()]
    if sized and all(tensor.numel() == 0 for tensor in sized):
        raise ValueError(f"the feed is empty: {described(batch)}. Leave it out, on all workers alike.")
    return batch


def described(batch: Mapping[str, Tensor]) -> str:
    """Names, kinds and shapes, for messages."""
    return ", ".join(f"{name} {_kind(tensor)}" for name, tensor in batch.items()) or "empty"


def kinds(batch: Mapping[str, Tensor]) -> dict[str, str]:
    """The same, by name."""
    return {name: _kind(tensor) for name, tensor in batch.items()}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, list | tuple) and any(isinstance(item, np.ndarray) for item in value):
            value = np.stack(value)
        if isinstance(value, np.ndarray):
            value = _usable(value)
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"the feed's {name!r} must be a tensor, an array or nested lists of numbers, all rows equally long; "
            f"got {shown(value)} ({error})."
        ) from None


def _usable(array: np.ndarray) -> np.ndarray:
    """torch takes neither foreign byte orders nor negative strides, and warns of arrays that cannot be written."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return array if usable else array.copy()
