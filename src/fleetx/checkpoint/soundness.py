"""Whether a checkpoint whose hashes are right also holds what a save writes.

A hash says that a file is as it was written, not that this library wrote it. What no save writes is found before
anything is put back, so that the checkpoint is passed over like any other damaged one.
"""

import random
import struct
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetx.checkpoint.errors import Damaged, OfAnotherJob
from fleetx.checkpoint.state import Run, can_check
from fleetx.fleet.optimizer import DistributedOptimizer

Tree = dict[str, Any]
_SHARED_PARTS = ("models", "optimizers")
_OWN_PARTS = ("buffers", "windows", "loaders", "start", "also", "random", "extra")


@contextmanager
def sound(file: str) -> Generator[None]:
    """Around a look at the contents of a file: whatever goes wrong there is wrong with the file."""
    try:
        yield
    except Damaged:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error) as error:
        what = str(error).splitlines()[0][:200] if str(error) else "no reason given"
        raise Damaged(f"{file} holds what no save writes ({type(error).__name__}: {what})") from error


def require_shared(run: Run, shared: Any) -> None:
    """Raise `Damaged` unless models and optimizers can be given this."""
    _require_dict(shared, *_SHARED_PARTS)
    for name in run.models:
        if name not in shared["models"]:
            raise OfAnotherJob(f"it is of another job: it has no model of the name {name!r}")
        saved = _require_dict(shared["models"][name], "weights", "metadata")
        metadata = saved["metadata"]
        _require(metadata is None or all(isinstance(one, Mapping) for one in metadata.values()), "odd metadata")
    for name, optimizer in run.optimizers.items():
        saved = shared["optimizers"][name]
        ours = isinstance(optimizer, DistributedOptimizer)
        here = optimizer.state_in_use() if ours else optimizer.state_dict()
        if isinstance(here, dict) and {"state", "param_groups"} <= here.keys():
            inner = optimizer.inner if ours else optimizer
            _require_groups(saved, here["param_groups"], type(inner).__module__.startswith("torch.optim."))
        if ours and "fleetx" in saved:
            _require_ours(saved["fleetx"], here["fleetx"])


def require_own(run: Run, shared: Any, own: Any) -> None:
    """Raise `Damaged` unless a worker's models, windows, loaders and generators can be given this."""
    _require_dict(own, *_OWN_PARTS)
    for part in ("buffers", "windows", "loaders", "also", "extra"):
        _require_dict(own[part])
    for name, model in run.models.items():
        saved = _require_dict(own["buffers"][name]) | shared["models"][name]["weights"]
        _require_fitting(model, saved)
    for name, optimizer in run.optimizers.items():
        window = own["windows"][name]
        if isinstance(optimizer, DistributedOptimizer) and window is not None:
            _require_window(window, optimizer)
    if own["start"] is not None:
        start = _require_dict(own["start"], "held", "loaders", "buffers")
        for saved in _require_dict(start["loaders"]).values():
            _require_dict(saved, "epoch", "batches")
        _require_positions(run, start["loaders"])
        _require(all(isinstance(value, Tensor) for value in _require_dict(start["buffers"]).values()), "odd buffers")
        if run.start is not None:
            run.start.require_fitting(start["buffers"])
    _require_positions(run, own["loaders"])
    _require_random(own["random"])


def _require_positions(run: Run, positions: Tree) -> None:
    for name, loader in run.loaders.items():
        saved = positions.get(name)
        if saved is None or not can_check(loader):
            continue
        here = loader.state_dict()
        _require_dict(saved, *here)
        if saved["plan"] == here["plan"]:  # else it is refused with a remedy, not passed over
            loader.check_state_dict(saved)


def _require_groups(saved: Tree, groups: list[Tree], is_torchs_own: bool) -> None:
    """What torch takes for granted when it loads an optimizer's state."""
    _require_dict(saved, "state", "param_groups")
    entries = [_require_dict(entry) for entry in _require_dict(saved["state"]).values()]
    if is_torchs_own and any("step" in entry for entry in entries):  # torch then looks for it in all of them
        steps = [_require_dict(entry, "step")["step"] for entry in entries if entry]
        _require_alike(steps, [0] * len(steps))
    _require(len(saved["param_groups"]) == len(groups), "another number of parameter groups")
    for there, here in zip(saved["param_groups"], groups, strict=True):
        _require_dict(there, "params", *(["lr"] if "lr" in here else []))
        _require(len(there["params"]) == len(here["params"]), "a parameter group of another size")
        _require_alike(there["params"], list(range(len(here["params"]))))
        options = {key: value for key, value in there.items() if key in here and key != "params" and value is not None}
        _require_alike(options, {key: here[key] for key in options})


def _require_ours(saved: Any, here: Tree) -> None:
    here = {part: value for part, value in here.items() if part != "window"}
    _require_dict(saved, *here)
    optional = [part for part in ("masters", "scaler", "scheduler") if None in (saved[part], here[part])]
    here = {part: value for part, value in here.items() if part not in optional}
    for part in {"watch", "scaler"} & here.keys():
        _require_dict(saved[part], *here[part])
    if "masters" in here:
        _require(len(saved["masters"]) == len(here["masters"]), "another number of masters")
    _require_alike(saved, here)


def _require_window(window: Any, optimizer: DistributedOptimizer) -> None:
    here = optimizer.engine.window.state_dict(copy=False)
    _require_dict(window, *here)
    _require_alike(
        {key: window[key] for key in ("held", "rank", "workers")}, dict.fromkeys(("held", "rank", "workers"), 0)
    )
    kind, unit = window["weighing"]
    _require(kind in ("mean", "items", "sum"), "odd weighing")
    for number in (unit, window["weight"]):
        _require(number is None or isinstance(number, bool | int | float | Tensor), "odd weights")
    _require(all(isinstance(loss, Tensor) for loss in window["losses"]), "odd losses")
    if window["held"]:
        buffers = optimizer.engine.buffers.live()
        _require(_require_dict(window["buffers"]).keys() <= buffers.keys(), "buffers that the models have not")
        _require_alike(window["buffers"], buffers)
        parameters = optimizer.engine.updater.parameters()
        _require(len(window["grads"]) == len(parameters), "another number of gradients")
        for grad, parameter in zip(window["grads"], parameters, strict=True):
            _require(grad is None or grad.shape == parameter.shape, "a gradient of another shape")


def _require_fitting(model: nn.Module, saved: Tree) -> None:
    """torch copies all that fits before it says what does not."""
    here = model.state_dict()
    _require(here.keys() == saved.keys(), f"other tensors than the model has: {sorted(here.keys() ^ saved.keys())[:3]}")
    tensors = {name: value for name, value in here.items() if isinstance(value, Tensor)}
    _require(all(isinstance(saved[name], Tensor) for name in tensors), "no tensor for a parameter or buffer")
    _require_alike({name: saved[name] for name in tensors}, tensors)


def _require_random(saved: Any) -> None:
    """Try the states on generators that nothing draws from."""
    _require_dict(saved, "python", "numpy", "torch", "cuda")
    random.Random().setstate(saved["python"])
    np.random.RandomState().set_state(saved["numpy"])
    torch.Generator().set_state(saved["torch"])
    _require(all(isinstance(one, Tensor) and one.dtype == torch.uint8 for one in saved["cuda"]), "an odd CUDA state")


def _require_alike(saved: Any, here: Any) -> None:
    """Raise unless it is of the kind of what is here; where that is None, anything may be saved."""
    if here is None:
        return
    if isinstance(here, Mapping):
        _require_dict(saved)
        for key in saved.keys() & here.keys():
            _require_alike(saved[key], here[key])
    elif isinstance(here, list | tuple):
        _require(isinstance(saved, list | tuple), f"{saved!r:.60} for a list")
        for there, value in zip(saved, here, strict=False):
            _require_alike(there, value)
    elif isinstance(here, Tensor) and here.dim():
        _require(isinstance(saved, Tensor) and saved.shape == here.shape, "a tensor of another shape")
    elif isinstance(here, bool | int | float | Tensor):
        _require(isinstance(saved, bool | int | float | Tensor), f"{saved!r:.60} for a number")
    elif isinstance(here, str):
        _require(isinstance(saved, str), f"{saved!r:.60} for a text")


def _require_dict(value: Any, *keys: str) -> Tree:
    _require(isinstance(value, dict), f"{value!r:.60} for a dict")
    missing = [key for key in keys if key not in value]
    _require(not missing, f"no {', '.join(missing)}")
    return value


def _require(holds: bool, found: str) -> None:
    if not holds:
        raise ValueError(found)
