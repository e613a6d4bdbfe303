"""Runs a model without leaving a trace: parameters, gradients, buffers, attributes and random generators stay."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.memory.generators import is_generator, put_state, state_of
from fleetx.memory.structures import tensors_in

_OF_ALL_MODULES = frozenset(vars(nn.Module()))  # parameters, buffers, hooks


class Before:
    """A model as it was, as far as a forward may change it: buffers, attributes, random generators.

    Weights and gradients are not part of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(owner, name, b, None if b is None else b.detach().clone()) for owner, name, b in _held(model)]
        self._attributes = [(vars(module), vars(module).copy()) for module in model.modules()]
        self._containers = [(held, held.copy()) for held in _containers(model)]
        self._tensors = [(held, held.detach().clone()) for held in _tensors(model)]
        self._generators = [(one, state_of(one)) for one in _generators(model)]
        self._random = _random_state()

    def restore(self) -> None:
        """Make everything as it was, to the last bit."""
        _restore_random(self._random)
        for generator, state in self._generators:
            put_state(generator, state)
        for now, then in self._attributes:
            now.clear()
            now.update(then)
        for held, copy in self._containers:
            held.clear()
            fill = held.extend if isinstance(held, list | deque) else held.update
            fill(copy)
        for owner, name, buffer, copy in self._buffers:
            owner._buffers[name] = buffer
            if buffer is not None and copy is not None:
                with torch.no_grad():
                    buffer.copy_(copy)
        for held, copy in self._tensors:
            held.detach().copy_(copy)


@contextmanager
def untouched(model: nn.Module, *others: object, gradients: bool = True) -> Iterator[None]:
    """Inside, the model may be trained on anything; afterwards everything is as it was, to the last bit.

    Inside, parameters have gradients of their own, zero at first (none with `gradients=False`), and nobody who waits
    for gradients is told. Weights must not be written to.

    `others` are what the model is trained with: a loss function that is a module is left as it was, too, and a sample
    gets no gradients.
    """
    modules = [model, *(one for one in others if isinstance(one, nn.Module))]
    parameters = _trained(modules)
    befores = [Before(one) for one in modules]  # which takes memory: if there is too little, nothing was taken away yet
    saved = [(p, p.grad, _take_hooks(p)) for p in [*parameters, *_leaves(others)]]
    try:
        for tensor, _, _ in saved:
            tensor.grad = None
        for parameter in parameters if gradients else ():
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for tensor, gradient, hooks in saved:
            tensor.grad = gradient
            if hooks:
                tensor._post_accumulate_grad_hooks.update(hooks)
        for before in befores:
            before.restore()


def _trained(modules: list[nn.Module]) -> list[Tensor]:
    """All parameters with gradients, each once: a loss function may share some with the model."""
    found = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    return list(found.values())


def _leaves(others: tuple[object, ...]) -> list[Tensor]:
    """The tensors of samples that would be left with gradients."""
    found = {id(t): t for one in others if not isinstance(one, nn.Module) for t in tensors_in(one)}
    return [tensor for tensor in found.values() if tensor.requires_grad and tensor.is_leaf]


def _held(model: nn.Module) -> list[tuple[nn.Module, str, Tensor | None]]:
    return [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]


def _containers(model: nn.Module) -> list[Any]:
    """Lists, dicts and the like that modules keep for themselves, and may write to: counts, histories."""
    return [value for value in _attributes(model) if isinstance(value, list | deque | dict | set)]


def _tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that modules keep beside their buffers."""
    return [value for value in _attributes(model) if isinstance(value, Tensor) and value.layout is torch.strided]


def _attributes(model: nn.Module) -> list[Any]:
    return [value for m in model.modules() for name, value in vars(m).items() if name not in _OF_ALL_MODULES]


def _generators(model: nn.Module) -> list[Any]:
    """Generators that modules keep for themselves."""
    return [value for m in model.modules() for value in vars(m).values() if is_generator(value)]


def _take_hooks(tensor: Tensor) -> dict[Any, Any]:
    """What would be told of a gradient; not told while this is away."""
    hooks = tensor._post_accumulate_grad_hooks
    taken = dict(hooks or {})
    if hooks:
        hooks.clear()
    return taken


def _random_state() -> tuple[Any, ...]:
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), on_gpu, random.getstate(), _numpy_random().get_state()


def _restore_random(state: tuple[Any, ...]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
    random.setstate(state[2])
    _numpy_random().set_state(state[3])


def _numpy_random() -> Any:
    import numpy as np

    return np.random
