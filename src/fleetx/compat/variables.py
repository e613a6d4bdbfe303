"""Symbols of the guide's static graphs: a loss with a name, and a scope that looks variables up."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from fleetx.compat.names import translate
from fleetx.static import default_main_program
from fleetx.static.fetching import as_array


@dataclass(frozen=True, eq=False)
class LossVariable:
    """`model.loss`: not a number yet, but what the program of its model minimises."""

    model: nn.Module
    name: str = "loss"


@dataclass(frozen=True, eq=False)
class ScopeTensor:
    """What `scope.var(name).get_tensor()` gives: the present value, as an array."""

    tensor: Tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The value on the host."""
        return np.array(as_array(self.tensor), dtype=dtype, copy=True if copy is None else copy)


@dataclass(frozen=True, eq=False)
class ScopeVariable:
    """A parameter or buffer of the main program."""

    name: str
    tensor: Tensor

    def get_tensor(self) -> ScopeTensor:
        """Its value, now."""
        return ScopeTensor(self.tensor.detach())


class Scope:
    """Looks up parameters and buffers of the default main program by Paddle's names or by ours."""

    def var(self, name: str) -> ScopeVariable:
        """The variable of this name."""
        model = default_main_program().require_model()
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        ours = translate(name)
        if ours not in tensors:
            raise ValueError(
                f"the program has no parameter {name!r}"
                + (f" ({ours!r} here)" if ours != name else "")
                + f". The first of its {len(tensors)} names are {', '.join(list(tensors)[:3])}."
            )
        return ScopeVariable(name, tensors[ours])

    find_var = var


_scope = Scope()


def global_scope() -> Scope:
    """The one scope there is."""
    return _scope
