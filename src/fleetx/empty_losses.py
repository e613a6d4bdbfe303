"""Losses without items: each has a zero gradient, whatever its formula makes of 0/0.

The mean over no items is NaN, and the derivative of 0/0 is NaN too, also where nothing flows back into it. So the
gradient of such a loss is replaced by zeros where it leaves what the loss alone computes. Which parameters it reaches
stays as it is: as in the big batch, they have a gradient, and it is zero.
"""

import heapq
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from fleetx.comm import batch_norms
from fleetx.numbers import Number


@contextmanager
def muted(losses: Sequence[Tensor], counts: Sequence[Number], parameters: Sequence[Tensor]) -> Generator[None]:
    """Around the backward of weighted `losses`, which average over `counts` items each.

    A count on a device is not waited for: then the device decides.
    """
    if not any(_may_be_empty(count) for count in counts):
        yield
        return
    alone = len(losses) == 1 or not any(isinstance(count, Tensor) or count for count in counts)
    if alone and not batch_norms.are_in_use():
        hook = _hook_of_a_parameter(counts[0])
        hooks = [parameter.register_hook(hook) for parameter in parameters if parameter.requires_grad]
    else:
        hooks = [node.register_hook(_hook_of_a_node(counts[place])) for node, place in _exits(losses, counts)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _may_be_empty(count: Number) -> bool:
    return isinstance(count, Tensor) or not count


def _hook_of_a_parameter(count: Number) -> Callable[[Tensor], Tensor]:
    return lambda grad: _kept(grad, count)


def _hook_of_a_node(count: Number) -> Callable[[Any, Any], Any]:
    return lambda inputs, _outputs: tuple(None if grad is None else _kept(grad, count) for grad in inputs)


def _kept(grad: Tensor, count: Number) -> Tensor:
    if grad.layout != torch.strided:
        return grad  # refused as such, where gradients are merged
    if isinstance(count, Tensor):
        return torch.where((count > 0).to(grad.device), grad, 0.0)
    return torch.zeros_like(grad)


def _is_parameter(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _exits(losses: Sequence[Tensor], counts: Sequence[Number]) -> list[tuple[Node, int]]:
    """The last steps that a loss which may be empty has to itself, with its place.

    After them the backward comes to what several losses share, or to parameters; or to norms over all workers, through
    which the other workers' losses reach the parameters too.
    """
    owners = _owners(losses)
    found = []
    for node, places in owners.items():
        place = next(iter(places))
        if len(places) > 1 or not _may_be_empty(counts[place]):
            continue
        following = [child for child, _ in node.next_functions if child is not None]
        if any(len(owners.get(child, ())) != 1 for child in following):  # parameters and norms have no entry
            found.append((node, place))
    return found


def _owners(losses: Sequence[Tensor]) -> dict[Node, frozenset[int]]:
    """Which losses reach each step of the graph; below the first steps that several share nobody looks.

    Later steps have higher numbers, so that a step is usually looked at when all that lead to it are known; where it
    was not (graphs made by several threads), it is looked at again.
    """
    owners: dict[Node, frozenset[int]] = {}
    opened: set[Node] = set()
    waiting: list[tuple[int, int, Node]] = []

    def reach(node: Node, places: frozenset[int]) -> None:
        before = owners.get(node, frozenset())
        if not places <= before:
            owners[node] = before | places
            heapq.heappush(waiting, (-node._sequence_nr(), id(node), node))

    for place, loss in enumerate(losses):
        if loss.grad_fn is not None:
            reach(loss.grad_fn, frozenset([place]))
    while waiting:
        node = heapq.heappop(waiting)[2]
        if len(owners[node]) > 1 and node not in opened:
            continue
        opened.add(node)
        for child, _ in node.next_functions:
            if child is not None and not batch_norms.is_synchronized(child) and not _is_parameter(child):
                reach(child, owners[node])
    return owners
