"""A clock that counts work: the planner's times are then the same on a busy machine as on an idle one."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fleetx import clock

_SECONDS_PER_OPERATION = 1e-5
_SECONDS_PER_BYTE = 1e-9
_SECONDS_PER_PRODUCT = 1e-10
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


class WorkClock(TorchDispatchMode):
    """While it is open the planner has no other clock: an operation takes time by its bytes and products."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1.0
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> "WorkClock":
        """Stand in for the module `time`."""
        self._patch.setattr(clock, "time", SimpleNamespace(perf_counter=self.perf_counter, sleep=self.sleep))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Give the planner its own clock again."""
        super().__exit__(*error)
        self._patch.undo()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let models be compiled; what runs inside of compiled code takes no time."""
        return True

    def sleep(self, seconds: float) -> None:
        """Let time pass without any work."""
        self._now += seconds

    def perf_counter(self) -> float:
        """Seconds of work so far; a little passes with every look."""
        self._now += 1e-9
        return self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor)]
        written = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._now += _SECONDS_PER_OPERATION + _SECONDS_PER_BYTE * written
        if func.overloadpacket.__name__ in _PRODUCTS:
            inner = max(
                (tensor.shape[-1] for tensor in args[:3] if isinstance(tensor, Tensor) and tensor.dim()), default=1
            )
            self._now += _SECONDS_PER_PRODUCT * inner * sum(tensor.numel() for tensor in tensors)
        return output


@pytest.fixture
def work_clock():
    """Plans of this test do not depend on how busy the machine is."""
    with WorkClock() as clock:
        yield clock
