"""Models without memory: built on the meta device, and given weights when the startup program runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from fleetx.notices import shown, tell_once


def build(factory: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """The model that `factory(...)` makes, without its weights; `materialise` makes these later, by its own rules."""
    if isinstance(factory, nn.Module):
        name = type(factory).__name__
        raise TypeError(
            f"build makes the model itself, and got one that is made already, a {name}: give the class, "
            f"static.build({name}, ...), or give this model to Program as it is."
        )
    if not callable(factory):
        raise TypeError(f"build takes a class or function that makes a model, got {shown(factory)}: give the class.")

    def again() -> nn.Module:
        return factory(*args, **kwargs)

    with torch.device("meta"):
        model = again()
    if not isinstance(model, nn.Module):
        raise TypeError(f"build takes what makes an nn.Module, and this made a {type(model).__name__}: give the class.")
    object.__setattr__(model, "_fleetx_factory", again)
    return model


def is_materialised(model: nn.Module) -> bool:
    """Whether the model's tensors have memory."""
    return not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialise(model: nn.Module, device: torch.device, seed: int) -> None:
    """Give a model its weights on `device`: seeded, thus the same on all workers, and without touching other RNGs.

    Parameters stay the same objects, so that optimizers and names that were made before keep their meaning.
    """
    factory = getattr(model, "_fleetx_factory", None)
    if is_materialised(model):
        model.to(device)
        if factory is not None:
            tell_once("started", "the startup program ran before: the model keeps the weights that it has.")
        return
    if factory is None:
        raise ValueError(
            "the model lies on the meta device and nobody knows how to fill it: build it with "
            "fleetx.static.build(YourModel, ...), or load its weights before the startup program runs."
        )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        # Drawn on the host: the same numbers whatever the device.
        filled = factory().to(device)
    ours, theirs = _tensors(model), _tensors(filled)
    seen: set[int] = set()
    for name, tensor in ours.items():
        if id(tensor) not in seen:  # tied tensors are swapped once
            seen.add(id(tensor))
            requires_grad = tensor.requires_grad
            swap_tensors(tensor, theirs[name])
            tensor.requires_grad_(requires_grad)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(model.named_buffers(remove_duplicate=False))
