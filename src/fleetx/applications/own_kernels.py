"""When kernels of our own take the place of torch's: for low precision on a GPU, where nobody asks for more."""

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fleetx.numbers import LOW_PRECISION

HAS_TRITON = importlib.util.find_spec("triton") is not None


def can_take(input: Tensor) -> bool:
    """Whether this tensor may be given to a kernel; not where torch watches or rewrites what is computed.

    To be asked before anything else: the compiler would guard other questions about the tensor.
    """
    if torch.compiler.is_compiling() or not (HAS_TRITON and input.is_cuda):
        return False
    return input.dtype in LOW_PRECISION and type(input) is Tensor and not _is_traced() and not _is_transformed()


def must_be_torchs(gradient: Tensor) -> bool:
    """Whether a backward needs torch's own operations: a derivative of it is asked for, or many at once."""
    if torch.is_grad_enabled() or _is_transformed():
        return True
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def power_of_two_from(number: int) -> int:
    """The least one that is no smaller: how many columns a program reads."""
    return 1 << (number - 1).bit_length()


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside, kernels start on the tensor's device; that it is the current one already is the rule, and costs less."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def _is_traced() -> bool:
    """Whether operations are written down, to be run later: those in a kernel would be missing."""
    return torch.jit.is_tracing() or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def _is_transformed() -> bool:
    """Whether torch computes something else from what is computed here: many at once, or a derivative forwards."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
