"""Whether a repeated module gave what it gave before: sums over the bits of its outputs, for it to be told apart."""

from typing import Any

import torch
from torch import Tensor

from fleetx.memory.tape import pointer_of

_WHOLE_NUMBERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bits(tensor: Tensor) -> Tensor:
    """The tensor as whole numbers: so NaNs are equal if their bits are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    return tensor.view(_WHOLE_NUMBERS[tensor.element_size()])


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor | None:
    """A few numbers, on its device, that are others if the tensor's bits or their order are; None if it has no bits.

    Sums over rows and columns, weighted by their places: little memory beside a large tensor, and nobody waits.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or pointer_of(tensor) is None or tensor.is_quantized:
        return None
    if tensor.device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        return None  # kernels there may give other last bits each time
    numbers = bits(tensor.detach())
    numbers = numbers.reshape(1) if numbers.dim() == 0 else numbers
    rows = numbers.sum(-1, dtype=torch.int64).flatten()
    columns = numbers.sum(tuple(range(numbers.dim() - 1)), dtype=torch.int64) if numbers.dim() > 1 else numbers.long()
    return torch.stack([_weighted(rows), _weighted(columns)])


def is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two checksums are those of equal tensors; what has none is taken to be."""
    return one is None or other is None or torch.equal(one, other)


class LateFillers:
    """Finds operations in a graph that fill a tensor only after it was saved; each part of the graph is seen once.

    Who repeats them must not stop at what they save. torch has one such: the noise of rrelu.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def are_behind(self, outputs: list[Tensor]) -> bool:
        """Whether these outputs are made by one, as far as nobody asked for that part of the graph before."""
        waiting = [output.grad_fn for output in outputs]
        found = False
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._seen:
                self._seen.add(node)
                found = found or node.name().startswith("RreluWithNoise")
                waiting += [before for before, _ in node.next_functions]
        return found


def _weighted(sums: Tensor) -> Tensor:
    odd = torch.arange(1, 2 * len(sums), 2, device=sums.device)  # so that no bit is shifted out
    return (sums * odd).sum()
