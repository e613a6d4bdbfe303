"""What each parameter is called and what kind it is.

An optimizer is given tensors. Rules such as "no weight decay on biases and norms" speak of names and of
modules, so the model is asked once, by ``record``, and every later reader asks ``info``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakTensorKeyDictionary

from fleetx.wrapped_names import unwrapped_orders

KINDS = (
    "bias",
    "norm",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "rms_norm",
    "embedding",
)
"""Every kind a parameter can have; a BatchNorm's bias has three: bias, norm and batch_norm."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """A parameter's qualified name and its kinds; ``kinds_known`` is False where only a name was given."""

    name: str
    kinds: frozenset[str] = frozenset()
    kinds_known: bool = False


# Weak, and by identity: the registry keeps no model alive, and equal tensors are different parameters.
_registry = WeakTensorKeyDictionary()
_positions = WeakTensorKeyDictionary()


def record(model: nn.Module) -> None:
    """Remember name and kinds of each parameter of ``model``; a later call replaces what was remembered.

    A parameter that several modules share has the name ``model.named_parameters()`` gives it, which is its
    first one, and the kinds of all its owners.
    """
    names: dict[Tensor, str] = {}
    kinds: dict[Tensor, frozenset[str]] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(parameter, f"{path}.{leaf}" if path else leaf)
            owned = _kinds_of(*_owner(model, path, module, leaf))
            kinds[parameter] = kinds.get(parameter, frozenset()) | owned
    for parameter, name in names.items():
        _registry[parameter] = ParameterInfo(name, kinds[parameter], kinds_known=True)
    for place, parameter in enumerate(names):
        _positions[parameter] = place


def info(parameter: Tensor) -> ParameterInfo | None:
    """What ``record`` learned about this parameter, or None."""
    return _registry.get(parameter)


def position(parameter: Tensor) -> int:
    """Where the parameter stands among those of its model; 0 where nobody recorded it."""
    return _positions.get(parameter, 0)


def label(parameter: Tensor) -> str:
    """What a message calls a parameter: its name, or its shape where nobody told its name."""
    known = info(parameter)
    return known.name if known else f"a parameter of shape {tuple(parameter.shape)}"


Order = Sequence[Sequence[str | None]]
"""The name of each parameter of each group of an optimizer; None where it is unknown."""


def in_groups(groups: Sequence[Mapping[str, Any]], named: Iterable[str | None]) -> list[list[str | None]]:
    """The names of all parameters, parted as the groups are."""
    remaining = iter(named)
    return [[next(remaining) for _ in group["params"]] for group in groups]


def displacement(saved: Order, here: Order) -> str | None:
    """How the order of saved parameters differs from the order here; None if it does not.

    A state dict says whose momentum it holds by places alone. A saved name that is unknown here is a model that was
    renamed, and no other order. One that was wrapped (DistributedDataParallel, compile) is none of these.
    """
    saved, here = unwrapped_orders(saved, here)
    known = {name for names in here for name in names}
    for number, (theirs, own) in enumerate(zip(saved, here, strict=False)):
        for index, (there, name) in enumerate(zip(theirs, own, strict=False)):
            if there != name and None not in (there, name) and there in known:
                return (
                    f"parameter {index} of group {number} is {there!r} there and {name!r} here, so momentum would "
                    "serve the wrong parameters: build the groups in the same order, from lists and not from sets"
                )
    return None


# A class says what it is in its own name or a base's: torch's BatchNorm2d and _BatchNorm, LlamaRMSNorm,
# BatchNormAct2d. Only the end of a name counts: a LayerNormLSTMCell owns more than norms.
_TAIL = r"(?:act|gated|fp32|bf16)?(?:\d+d?)?$"
_NORM_CLASS = re.compile(r"(batch|layer|group|instance|rms)?(?<!weight)(?<!spectral)norm" + _TAIL)
_EMBEDDING_CLASS = re.compile(r"embeddings?(?:bag)?" + _TAIL)


def _owner(model: nn.Module, path: str, module: nn.Module, leaf: str) -> tuple[nn.Module, str]:
    """The module and attribute a parameter serves: its own, or the ones it is a parametrization of."""
    if not isinstance(module, ParametrizationList):
        return module, leaf
    outer, _, attribute = path.rpartition("parametrizations.")
    return model.get_submodule(outer.removesuffix(".")), attribute


def _kinds_of(module: nn.Module, leaf: str) -> frozenset[str]:
    kinds = set()
    for cls in type(module).__mro__:
        name = cls.__name__.lower().replace("_", "")
        if norm := _NORM_CLASS.search(name):
            kinds |= {"norm", f"{norm[1]}_norm"} if norm[1] else {"norm"}
        if _EMBEDDING_CLASS.search(name):
            kinds.add("embedding")
    # "bias", attention's in_proj_bias and bias_k, an LSTM's bias_ih_l0.
    if leaf == "bias" or leaf.startswith("bias_") or leaf.endswith("_bias"):
        kinds.add("bias")
    return frozenset(kinds)
