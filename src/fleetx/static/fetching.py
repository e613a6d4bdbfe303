"""Finds what a name in a fetch list stands for: a loss, a parameter, its gradient, a buffer, or a module's output."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from fleetx.slicing import map_tensors

Kind = Literal["loss", "parameter", "gradient", "buffer", "output"]
GRADIENT_ENDINGS = ("@GRAD", ".grad")


@dataclass(frozen=True)
class Fetch:
    """One entry of a fetch list, resolved."""

    kind: Kind
    name: str


def resolve(wanted: Any, model: nn.Module, losses: Sequence[str]) -> Fetch:
    """What `wanted` (a name, or an object with `.name`) means in this model."""
    name = wanted if isinstance(wanted, str) else getattr(wanted, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"a fetch list holds names or objects with .name, not a {type(wanted).__name__}.")
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
    known = ["loss", *losses, *parameters, *(f"{p}@GRAD" for p in parameters), *buffers, *modules]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    raise ValueError(
        f"nothing is called {name!r}"
        + (f" (near: {', '.join(near)})" if near else "")
        + ". Fetch a loss, a parameter, 'parameter@GRAD', a buffer, or the name of a module for its output."
    )


class OutputTaps:
    """Hooks that note the outputs of named modules. They must be there before a model is compiled."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.outputs: dict[str, Any] = {}
        self._handles = [model.get_submodule(name).register_forward_hook(self._tap(name)) for name in names]

    def _tap(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        outputs = self.outputs

        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[name] = output

        return note

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()


def as_array(value: Any) -> Any:
    """Host arrays in the place of tensors; bf16, which numpy does not know, as fp32."""

    def convert(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        return np.asarray((tensor.float() if tensor.dtype.itemsize == 2 else tensor).cpu().numpy())

    return None if value is None else map_tensors(value, convert)
