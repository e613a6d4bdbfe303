"""Whether a repeated module gave what it gave before: a few numbers of its outputs, for it to be told apart.

Where the same kernels give the same bits, these are compared. Elsewhere last bits may differ each time: then numbers
are compared that tell whether two tensors point in the same direction, and are as long.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fleetx.memory.tape import pointer_of

_FRACTIONS = {  # with the type in which they are added up
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
_WIDTH = 8192
_SMALL = 2.0**-7  # times the numbers of a row: their sum must not be too large for 16 bits
_FACTORS = (7_919, 15_485_863, 32_452_843, 49_979_687)
_ROUNDING = 0.05
"""What kernels round differently moves a tensor by less than a hundredth of its length; other numbers by far more."""
_MOST_MADE = 64
_made: dict[Any, Tensor] = {}  # signs, by all that they depend on
_WHOLE_NUMBERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bits(tensor: Tensor) -> Tensor:
    """The tensor as whole numbers: so NaNs are equal if their bits are."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    return tensor.view(_WHOLE_NUMBERS[tensor.element_size()])


class OfBits(NamedTuple):
    """Numbers that are others if the bits of a tensor, or their order, are."""

    sums: Tensor

    def is_of_equal(self, other: "OfBits") -> bool:
        """Whether both are of equal tensors."""
        return torch.equal(self.sums, other.sums)


class OfDirection(NamedTuple):
    """The length of a tensor, and how far it goes in some fixed directions."""

    stride: tuple[int, ...]
    lengths: Tensor

    def is_of_equal(self, other: "OfDirection") -> bool:
        """Whether both are of tensors that are equal but for rounding; what is not finite cannot be told apart."""
        known = 1 if self.stride != other.stride else None  # other ways through memory have their own directions
        apart = (self.lengths - other.lengths).abs() > _ROUNDING * torch.maximum(self.lengths[0], other.lengths[0])
        return not bool(apart[:known].any())


Checksum = OfBits | OfDirection


@torch.no_grad()
def checksum(tensor: Tensor) -> Checksum | None:
    """A few numbers, on its device, that tell the tensor from others; None if it has none. Nobody waits for them."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_quantized:
        return None
    if tensor.numel() == 0 or pointer_of(tensor) is None:  # an empty view has memory, and no numbers
        return None
    return _of_bits(tensor.detach()) if gives_same_bits(tensor.device) else _of_direction(tensor.detach())


def gives_same_bits(device: torch.device) -> bool:
    """Whether the same computation gives the same last bits there."""
    if device.type == "cpu":
        return True
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def is_equal(one: Checksum | None, other: Checksum | None) -> bool:
    """Whether two checksums are those of equal tensors; what has none is taken to be."""
    if isinstance(one, OfBits) and isinstance(other, OfBits):
        return one.is_of_equal(other)
    if isinstance(one, OfDirection) and isinstance(other, OfDirection):
        return one.is_of_equal(other)
    return True


def _of_bits(tensor: Tensor) -> OfBits:
    """Sums over rows and columns, weighted by their places: little memory beside a large tensor."""
    numbers = bits(tensor)
    numbers = numbers.reshape(1) if numbers.dim() == 0 else numbers
    rows = numbers.sum(-1, dtype=torch.int64).flatten()
    columns = numbers.sum(tuple(range(numbers.dim() - 1)), dtype=torch.int64) if numbers.dim() > 1 else numbers.long()
    return OfBits(torch.stack([_weighted(rows), _weighted(columns)]))


def _of_direction(tensor: Tensor) -> OfDirection | None:
    """Of numbers with a fraction, that lie side by side in memory: whole ones may jump where others are rounded."""
    if tensor.dtype not in _FRACTIONS or tensor.numel() == 0 or not _is_dense(tensor):
        return None
    flat, wide = tensor.as_strided((tensor.numel(),), (1,)), _FRACTIONS[tensor.dtype]
    width = min(len(flat), _WIDTH)
    whole = len(flat) // width * width
    rows, rest = flat[:whole].view(-1, width), flat[whole:]
    with torch.autocast(tensor.device.type, enabled=False):
        signs = _signs(width, tensor, _SMALL)
        ways = ((rows @ signs) * _signs(len(rows), tensor)).sum(0, dtype=wide)
        if len(rest):
            ways = ways + (rest[None] @ signs[: len(rest)])[0].to(wide)
    length = torch.linalg.vector_norm(flat, dtype=wide)
    stride = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return OfDirection(stride, torch.cat([length[None], ways / _SMALL]))


def _is_dense(tensor: Tensor) -> bool:
    both = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return all(stride > 0 for _, stride in both) and 1 + sum((n - 1) * step for n, step in both) == tensor.numel()


def _signs(count: int, like: Tensor, size: float = 1.0) -> Tensor:
    """Plus and minus `size` in `count` rows, without an order that anything else might have; made once.

    For each stream: another one might read them before they are there. A graph that is captured has its own, since it
    would go on to read what is forgotten here.
    """
    stream = 0
    if like.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _new_signs(count, like, size)
        stream = torch.cuda.current_stream(like.device).cuda_stream
    key = (count, like.dtype, like.device, stream, size)
    signs = _made.get(key)
    if signs is None:
        if len(_made) >= _MOST_MADE:
            _made.clear()
        signs = _made[key] = _new_signs(count, like, size)
    return signs


def _new_signs(count: int, like: Tensor, size: float) -> Tensor:
    places = torch.arange(1, count + 1, device=like.device)
    mixed = [(places * places * factor + places * 40_503 >> 15) & 1 for factor in _FACTORS]
    return torch.stack(mixed, 1).to(like.dtype).mul_(2 * size).sub_(size)


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
