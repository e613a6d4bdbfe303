"""Profiles on disk, found again by everything that they depend on."""

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fleetx.notices import tell_once
from fleetx.planner.costs import Profile
from fleetx.planner.feeding import Feeding
from fleetx.slicing import Batch, map_tensors
from fleetx.version import __version__

FORMAT = 6
_REMEDY = "let XDG_CACHE_HOME name a folder that can be written to."
_PLAIN = (bool, int, float, str, torch.dtype)


def folder() -> Path:
    """Where profiles are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fleetx" / "profiles"


def key_of(feeding: Feeding, sample: Batch, cuts: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Changes with the model's structure and code, the shapes, the dtypes, the device, the versions, the settings."""
    model = feeding.model
    facts = {
        "modules": [(name, type(module).__qualname__) for name, module in model.named_modules()],
        "described": repr(model),
        "code": sorted({_code(type(module)) for module in model.modules()}),
        "attributes": [(name, _attributes(module)) for name, module in model.named_modules()],
        "parameters": [(*_described(n, p), p.requires_grad) for n, p in model.named_parameters()],
        "buffers": [_described(n, b) for n, b in model.named_buffers()],
        "training": [module.training for module in model.modules()],
        "sample": _shapes(sample),
        "hooks": [(name, _hook(hook)) for name, m in model.named_modules() for hook in m._forward_pre_hooks.values()],
        "loss": "" if feeding.loss_fn is None else _code(feeding.loss_fn),
        "compute": "" if feeding.compute is None else _code(feeding.compute),
        "precision": str(feeding.precision),
        "autocast": [_autocast(kind) for kind in ("cpu", "cuda")],
        "cuts": list(cuts),
        "device": device_name(feeding.device),
        "versions": [torch.__version__, __version__, FORMAT],
        "settings": {name: str(value) for name, value in settings.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def load(key: str) -> Profile | None:
    """The profile with this key; one that cannot be read is said to be so, once, and measured anew."""
    path = folder() / f"{key}.json"
    try:
        profile = Profile.from_dict(json.loads(path.read_text(encoding="utf-8")))
        profile.check()
        return profile
    except (FileNotFoundError, NotADirectoryError):  # where no folder can be, `save` says so
        return None
    except Exception as error:  # whatever the file has become
        tell_once(
            f"planner.cache.{key}",
            f"the saved profile {path.name} cannot be read ({type(error).__name__}) and is measured anew; "
            f"delete it if this comes again: {path}",
        )
        return None


def save(key: str, profile: Profile) -> None:
    """Keep a profile; where the disk does not allow that, it is measured again next time."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder(), suffix=".part", delete=False, encoding="utf-8") as file:
            json.dump(profile.as_dict(), file)
        Path(file.name).replace(folder() / f"{key}.json")
    except OSError as error:
        tell_once("planner.cache.save", f"the profile could not be kept for next time ({error}): {_REMEDY}")


def forget(key: str) -> None:
    """Measure anew next time."""
    with suppress(OSError):  # it was never kept, or cannot be changed here
        (folder() / f"{key}.json").unlink()


def device_name(device: torch.device) -> str:
    """What people call the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _described(name: str, tensor: Tensor) -> tuple[Any, ...]:
    return name, list(tensor.shape), str(tensor.dtype), tensor.device.type


def _hook(hook: Any) -> str:
    """What others hooked to a module, and in which precision it makes that run."""
    owner = getattr(hook, "__self__", hook)
    dtypes = [f"{name} {value}" for name, value in getattr(owner, "__dict__", {}).items() if _is_dtype(value)]
    return " ".join([type(owner).__qualname__, *sorted(dtypes)])


def _attributes(module: nn.Module) -> dict[str, str]:
    """A module's own settings: a ratio or a number of heads changes what its forward does."""
    own = vars(module).items()
    return {name: repr(value) for name, value in own if isinstance(value, _PLAIN)}


def _autocast(kind: str) -> str:
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def _shapes(sample: Batch) -> str:
    """How a sample is nested and called, its tensors' shapes but for the number of samples, and its other values."""
    found: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        found.append((list(tensor.shape[1:]), str(tensor.dtype)))
        return tensor

    map_tensors(sample, note)
    leaves, structure = pytree.tree_flatten(sample)
    others = [leaf for leaf in leaves if isinstance(leaf, _PLAIN)]
    return f"{type(sample).__name__} {structure} {found} {others}"


def _code(thing: Any) -> str:
    """The source text, so that a changed forward is measured anew; else the name."""
    if isinstance(thing, nn.Module):
        return repr(thing) + _code(type(thing))
    if isinstance(thing, partial):
        return f"{_code(thing.func)} {thing.args!r} {thing.keywords!r}"
    try:
        return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()
    except (OSError, TypeError):
        return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"
