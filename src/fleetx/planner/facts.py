"""What the figures of a model depend on, as text: the same in each process, and another one if any of it changes."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetx.results import describe_machine
from fleetx.slicing import Batch, map_tensors

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)
_MANY = 1000  # entries: a vocabulary or a history, and no setting
_OF_ALL_MODULES = frozenset(vars(nn.Module()))


def facts_of_model(model: nn.Module) -> dict[str, Any]:
    """Its structure, code, settings and tensors, and what others hooked to it."""
    named = list(model.named_modules())
    return {
        "modules": [(name, type(module).__qualname__) for name, module in named],
        "described": repr(model),
        "code": sorted({code_of(kind) for _, module in named for kind in _own_kinds(module)}),
        "attributes": [(name, _attributes(module)) for name, module in named],
        "parameters": [(n, *_of_tensor(p), p.requires_grad) for n, p in model.named_parameters()],
        "buffers": [(n, *_of_tensor(b)) for n, b in model.named_buffers()],
        "training": [module.training for _, module in named],
        "hooks": [(name, _hook(hook)) for name, module in named for hook in _hooks(module)],
    }


def facts_of_sample(sample: Batch) -> str:
    """How a sample is nested and called, its tensors' shapes but for the number of samples, and its other values."""
    found: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        found.append((list(tensor.shape[1:]), str(tensor.dtype), _order(tensor)))
        return tensor

    map_tensors(sample, note)
    leaves, structure = pytree.tree_flatten(sample)
    others = [leaf for leaf in leaves if isinstance(leaf, _PLAIN)]
    return f"{type(sample).__name__} {structure} {found} {others}"


def surroundings(device: torch.device) -> list[Any]:
    """The device, and how torch is set to compute on it; a folder of profiles may be shared between machines."""
    return [
        device_name(device) if device.type == "cuda" else (describe_machine()["cpu"], torch.get_num_threads()),
        [_autocast(kind) for kind in ("cpu", "cuda")],
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    ]


def device_name(device: torch.device) -> str:
    """What people call the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def fact(thing: Any, depth: int = 3) -> str:
    """A value, a function or an object, without the address at which it happens to be; so many levels of it."""
    if isinstance(thing, _PLAIN):
        return repr(thing)
    if isinstance(thing, Tensor):
        return f"{_of_tensor(thing)}"
    if isinstance(thing, nn.Module):
        return f"{facts_of_model(thing)}"
    if isinstance(thing, partial):
        return f"partial {fact(thing.func)} {fact(thing.args)} {fact(thing.keywords)}"
    if isinstance(thing, type) or inspect.isroutine(thing):
        return code_of(thing)
    inside = _inside(thing) if depth else ()
    return f"{code_of(type(thing))} {[(fact(name), fact(value, depth - 1)) for name, value in inside]}"


def _inside(thing: Any) -> list[tuple[Any, Any]]:
    """What an object or a container holds, by name or number; of many things, their number."""
    if isinstance(thing, Mapping):
        held = list(thing.items())
    elif isinstance(thing, set | frozenset):
        held = [("", one) for one in sorted(thing, key=fact)]
    elif isinstance(thing, Sequence):
        held = [("", one) for one in thing]
    else:
        held = sorted(getattr(thing, "__dict__", {}).items())
    return held if len(held) <= _MANY else [("", len(held))]


def code_of(thing: Any) -> str:
    """The source text of a class or function, so that a changed forward is measured anew; else the name."""
    try:
        return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()
    except (OSError, TypeError):
        return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _own_kinds(module: nn.Module) -> list[Any]:
    """The classes that its code may come from; torch's own change with its version."""
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] != "torch"]
    return [*own, vars(module)["forward"]] if "forward" in vars(module) else own


def _attributes(module: nn.Module) -> dict[str, str]:
    """A module's own settings: a ratio or a number of heads changes what its forward does."""
    own = {name: value for name, value in vars(module).items() if name not in _OF_ALL_MODULES}
    return {name: fact(value) for name, value in own.items() if not isinstance(value, Tensor | nn.Module)}


def _hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def _hook(hook: Any) -> str:
    """What others hooked to a module, and in which precision it makes that run."""
    owner = getattr(hook, "__self__", hook)
    dtypes = {name: value for name, value in getattr(owner, "__dict__", {}).items() if isinstance(value, torch.dtype)}
    return f"{type(owner).__qualname__} {sorted(dtypes.items(), key=str)}"


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    return list(tensor.shape), str(tensor.dtype), tensor.device.type, _order(tensor)


def _order(tensor: Tensor) -> list[int]:
    """Its dimensions from the one with the largest steps on: channels may come last."""
    if tensor.layout is not torch.strided:
        return []
    return sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))


def _autocast(kind: str) -> str:
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
