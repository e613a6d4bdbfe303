"""Outputs that are saved because they take long to compute again: noted below autograd, given back when asked again."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fleetx.memory import randomness
from fleetx.memory.checking import Checksum, checksum, is_equal
from fleetx.memory.offload import View, is_worth_moving
from fleetx.memory.states import DEAR_KINDS

aten = torch.ops.aten
_MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
KINDS: dict[str, tuple[Any, ...]] = {
    "matmul": _MATMULS,
    "narrow_matmul": _MATMULS,  # those that give less than they read: much work for little memory
    "convolution": (aten.convolution,),
    "attention": (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._flash_attention_forward,
        aten._efficient_attention_forward,
    ),
}

_UNKNOWN = object()  # stands for a tensor that nothing tells from others
_UNSEEN_VIEWS = frozenset({aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk})
"""Their outputs share memory with their input, but not its version: who writes to them, as nn.GRU does, is not seen."""


def kinds_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds among the names in a segment's `dear`; all that are dear, if it names modules only."""
    return tuple(name for name in names if name in KINDS) or DEAR_KINDS


def is_dear(kinds: tuple[str, ...], function: Any, args: Sequence[Any]) -> bool:
    """Whether this operation is of one of these kinds."""
    kind = _kind_of(function, kinds)
    return kind != "" and (kind != "narrow_matmul" or _narrows(function.overloadpacket, args))


@cache
def _kind_of(function: Any, kinds: tuple[str, ...]) -> str:
    """The widest of these kinds that an operation may be of, if any; remembered, as each operation is asked about."""
    if function.name() == "fleetx::packed_attention":  # known only once it is needed
        return "attention" if "attention" in kinds else ""
    found = [kind for kind in kinds if function.overloadpacket in KINDS[kind]]
    return next((kind for kind in found if kind != "narrow_matmul"), found[0] if found else "")


def _narrows(packet: Any, args: Sequence[Any]) -> bool:
    read, weight = args[-2:] if packet in (aten.mm, aten.bmm) else args[1:3]
    return weight.shape[-1] < read.shape[-1]


@dataclass(eq=False)
class Noted:
    """The outputs of chosen operations, of those that ran while it `is_on`."""

    kinds: tuple[str, ...]
    device: randomness.Devices
    is_on: Callable[[], bool]
    is_checked: bool = False  # whether these operations must read the same when they are repeated
    saved: "list[Saved | None]" = field(default_factory=list)

    def chooses(self, function: Any, args: Sequence[Any]) -> bool:
        """Whether the output of this operation is noted."""
        return is_dear(self.kinds, function, args) and self.is_on()

    def forget(self, tensor: Tensor) -> None:
        """What shares memory with this one is computed again."""
        for number, saved in enumerate(self.saved):
            if saved is not None and saved.holds(tensor):
                self.saved[number] = None


class Saving(TorchDispatchMode):
    """Notes the outputs of chosen operations."""

    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self.noted: Noted | None = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        noted = self.noted
        if noted is None:
            return output
        if noted.chooses(func, args):
            noted.saved.append(Saved(output, func, noted.device, _read(args, kwargs) if noted.is_checked else None))
        elif func.overloadpacket in _UNSEEN_VIEWS:
            noted.forget(args[0])
        return output

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self.noted = None  # torch gives modes to its threads, which may know them for some time


class Saved:
    """The outputs of one operation, and where the random generators were after it."""

    def __init__(self, output: Any, function: Any, device: randomness.Devices, read: list[Any] | None) -> None:
        flat, self.structure = pytree.tree_flatten(output)
        # Detached: the tensors themselves will know the graph, which would then know itself.
        # With ADInplaceOrView, which is off below autograd: else the version would say nothing of later writes.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self.flat = [value.detach() if isinstance(value, Tensor) else value for value in flat]
        self.versions = [value._version if isinstance(value, Tensor) else 0 for value in self.flat]
        self.device = device
        self.function = function
        self.read = read  # what tells its inputs from others
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        self.after = randomness.state(device) if is_random else None

    def holds(self, tensor: Tensor) -> bool:
        """Whether an output lies in this tensor's memory."""
        place = tensor.untyped_storage().data_ptr()
        return any(isinstance(v, Tensor) and v.untyped_storage().data_ptr() == place for v in self.flat)

    def written_to(self) -> bool:
        """Whether somebody wrote to an output in place, so that it is not what the operation gave."""
        return any(isinstance(v, Tensor) and v._version != n for v, n in zip(self.flat, self.versions, strict=True))

    def has_read(self, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether these are its inputs, as far as somebody noted them."""
        if self.read is None:
            return True
        now = _read(args, kwargs)
        both = zip(self.read, now, strict=False)
        return len(self.read) == len(now) and all(itertools.starmap(_is_same, both))

    def park(self, park: Callable[[Tensor], View]) -> None:
        """Send the outputs that are worth it to the host."""
        self.flat = [park(v) if isinstance(v, Tensor) and is_worth_moving(v) else v for v in self.flat]

    def give(self) -> Any:
        """The outputs, as if they had been computed again."""
        if self.after is not None:
            randomness.restore(self.after, self.device)
        return pytree.tree_unflatten([_present(value) for value in self.flat], self.structure)


class Giving(TorchDispatchMode):
    """Gives noted outputs in place of computing them, in the order in which they were noted."""

    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self.noted: Noted | None = noted
        self.saved = iter(list(noted.saved))

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self.noted, self.saved = None, iter(())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.noted is not None and self.noted.chooses(func, args):
            saved = next(self.saved, None)
            if saved is not None and saved.function is not func:
                raise Different(f"called {func} when it was repeated, where it had called {saved.function}")
            if saved is not None and not saved.has_read(args, kwargs):
                raise Different(f"gave something else to {func} when it was repeated")
            if saved is not None and not saved.written_to():
                return saved.give()
        return func(*args, **(kwargs or {}))


class Different(Exception):  # noqa: N818 - it reads as what it says
    """A segment did something else when it was repeated; says what."""


def _read(args: Sequence[Any], kwargs: Any) -> list[Any]:
    """Of tensors their checksums, and all else as it is."""
    values = pytree.tree_leaves((args, kwargs or {}))
    return [(checksum(value) or _UNKNOWN) if isinstance(value, Tensor) else value for value in values]


def _is_same(one: Any, two: Any) -> bool:
    if one is _UNKNOWN or two is _UNKNOWN:
        return True
    return is_equal(one, two) if isinstance(one, Checksum) and isinstance(two, Checksum) else one == two


def _present(value: Any) -> Any:
    if isinstance(value, View):
        return value.fetch()
    return value.detach() if isinstance(value, Tensor) else value
