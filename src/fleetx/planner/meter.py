"""How many bytes tensors take, now and at most: asked of CUDA's allocator, or counted where there is none."""

import weakref
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Meter(Protocol):
    """Counts bytes while it is open."""

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None: ...

    def bytes(self) -> int:
        """Those in use now."""
        ...

    def take_peak(self) -> int:
        """The most that were in use since this was last asked."""
        ...


def meter_for(device: torch.device) -> Meter:
    """The meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else CountingMeter()


class CudaMeter:
    """Asks the allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left open."""

    def bytes(self) -> int:
        """See Meter."""
        return torch.cuda.memory_allocated(self.device)

    def take_peak(self) -> int:
        """See Meter."""
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


class CountingMeter(TorchDispatchMode):
    """Counts the memory of all tensors that operations make while it is open, until that memory is freed."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, Any] = {}
        self._bytes = 0
        self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views and writes give memory that was there before.
        given = {_place(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        output = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(output):
            if isinstance(value, Tensor) and _place(value) not in given:
                self._count(value)
        return output

    def _count(self, tensor: Tensor) -> None:
        place = _place(tensor)
        if place == 0 or place in self._alive:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()

        def freed(_: Any) -> None:
            if self._alive.pop(place, None) is not None:
                self._bytes -= size

        self._alive[place] = weakref.ref(storage, freed)
        self._bytes += size
        self._peak = max(self._peak, self._bytes)

    def bytes(self) -> int:
        """See Meter."""
        return self._bytes

    def take_peak(self) -> int:
        """See Meter."""
        peak, self._peak = self._peak, self._bytes
        return peak


def _place(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()
