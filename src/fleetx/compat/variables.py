"""Symbols of the guide's static graphs: a loss with a name, and a scope that looks variables up."""

import difflib
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
    """What `scope.var(name).get_tensor()` gives: the value, as an array when it is asked for."""

    tensor: Tensor

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The value on the host, always a copy: training goes on, and what was read must stay."""
        if copy is False:
            raise ValueError("a variable's value is copied to be read: leave out copy=False.")
        return np.array(as_array(self.tensor), dtype=dtype)


@dataclass(frozen=True, eq=False)
class ScopeVariable:
    """A parameter or buffer of the main program. Linear weights are (out, in), as in torch; Paddle's are (in, out)."""

    name: str
    tensor: Tensor

    def get_tensor(self) -> ScopeTensor:
        """Its value."""
        if self.tensor.is_meta:
            raise RuntimeError(
                f"the variable {self.name!r} has no value yet: run exe.run(default_startup_program()) once before."
            )
        return ScopeTensor(self.tensor.detach())


class Scope:
    """Looks up parameters and buffers of the default main program by Paddle's names or by ours."""

    def var(self, name: str) -> ScopeVariable:
        """The variable of this name."""
        model = default_main_program().require_model()
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        ours = translate(name)
        if ours not in tensors:
            near = difflib.get_close_matches(ours, tensors, n=3) or list(tensors)[:3]
            raise ValueError(
                f"the program has no parameter or buffer {name!r}"
                + (f" ({ours!r} here)" if ours != name else "")
                + f"; near among its {len(tensors)} names: {', '.join(near)}. Fetch anything else with fetch_list."
            )
        return ScopeVariable(name, tensors[ours])

    find_var = var


_scope = Scope()


def global_scope() -> Scope:
    """The one scope there is."""
    return _scope
