"""Finds what a name in a fetch list stands for: a loss, a parameter, its gradient, a buffer, or a module's output."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fleetx.slicing import map_tensors

Kind = Literal["loss", "parameter", "gradient", "buffer", "output"]
GRADIENT_ENDINGS = ("@GRAD", ".grad")
# Those that numpy has too; bfloat16 and the 8-bit ones it does not.
_FLOATS_OF_NUMPY = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Fetch:
    """One entry of a fetch list, resolved."""

    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.name}@GRAD" if self.kind == "gradient" else self.name


def as_list(fetch_list: Any) -> list[Any]:
    """The entries of a fetch list."""
    if fetch_list is None:
        return []
    if isinstance(fetch_list, str) or not isinstance(fetch_list, Sequence):
        what = repr(fetch_list) if isinstance(fetch_list, str) else f"a {type(fetch_list).__name__}"
        raise TypeError(f"a fetch list is a list of names, not {what}: put it in brackets.")
    return list(fetch_list)


def name_of(wanted: Any) -> str:
    """The name that an entry of a fetch list gives."""
    name = wanted if isinstance(wanted, str) else getattr(wanted, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"a fetch list holds names or objects with .name, not a {type(wanted).__name__}.")
    return name


def resolve(name: str, model: nn.Module, losses: Sequence[str]) -> Fetch:
    """What a name means in this model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if name == "loss" or name in losses:
        return Fetch("loss", name)
    if name in parameters:
        return Fetch("parameter", name)
    for ending in GRADIENT_ENDINGS:
        if name.endswith(ending) and name.removesuffix(ending) in parameters:
            return Fetch("gradient", name.removesuffix(ending))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    if name in buffers:
        return Fetch("buffer", name)
    modules = dict(model.named_modules(remove_duplicate=False))
    if name and name in modules:
        return Fetch("output", name)
    known = ["loss", *losses, *parameters, *(f"{p}@GRAD" for p in parameters), *buffers, *filter(None, modules)]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise ValueError(
        f"nothing is called {name!r}"
        + (f" (near: {', '.join(near)})" if near else "")
        + ". Fetch 'loss' or one of the names in the model's `losses`, a parameter, 'parameter@GRAD', a buffer, or the "
        "name of a module for its output."
    )


class OutputTaps:
    """Hooks that note the outputs of named modules. They must be there before a model is compiled."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.outputs: dict[str, Any] = {}
        self._handles = [model.get_submodule(name).register_forward_hook(self._tap(name)) for name in names]

    def _tap(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        outputs = self.outputs

        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # A copy: the next operation may write into it, as an in-place ReLU does.
            outputs[name] = map_tensors(output, _copied)

        return note

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()


def as_array(value: Any) -> Any:
    """Host arrays in the place of tensors; bf16, which numpy does not know, as fp32."""

    def convert(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        if tensor.is_floating_point() and tensor.dtype not in _FLOATS_OF_NUMPY:
            tensor = tensor.float()
        return np.asarray(tensor.cpu().numpy())

    return None if value is None else map_tensors(value, convert)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
