"""What else decides how torch computes, beside inputs and modules: noted for a call, put back when it is repeated."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch


class Surroundings(NamedTuple):
    """The modes and settings of torch."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    settings: tuple[Any, ...]

    @classmethod
    def now(cls, kinds: tuple[str, ...]) -> "Surroundings":
        """The present ones, for these kinds of devices."""
        autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return cls(torch.is_grad_enabled(), autocast, _settings())

    def restore(self) -> None:
        """Make them the present ones."""
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        present = _settings()
        if present != self.settings:  # seldom
            for set_to, now, before in zip(_SETTERS, present, self.settings, strict=True):
                if now != before:
                    set_to(before)


@cache
def settle_attention(device: torch.device) -> None:
    """The first attention of a process sets the order in which torch tries its kernels: not between call and repeat."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device), suppress(RuntimeError):  # if there is no kernel, whoever needs one will say so
        anything = torch.empty(1, 1, 8, 8, dtype=torch.half, device=device)
        torch._fused_sdp_choice(anything, anything, anything)


def _determinism() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _set_determinism(noted: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(noted[0], warn_only=noted[1])


def _matmul_precision() -> tuple[bool, str]:
    """torch has an old and a new way to set it; the old one fails where the new one was used."""
    try:
        return True, torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return False, torch._C._get_fp32_precision_getter("cuda", "matmul")


def _set_matmul_precision(noted: tuple[bool, str]) -> None:
    is_old, precision = noted
    if is_old:
        torch._C._set_float32_matmul_precision(precision)
    else:
        torch._C._set_fp32_precision_setter("cuda", "matmul", precision)


_KNOWN: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (_matmul_precision, _set_matmul_precision),
    (_determinism, _set_determinism),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
]
_GETTERS = [get for get, _ in _KNOWN]
_SETTERS = [set_to for _, set_to in _KNOWN]


def _settings() -> tuple[Any, ...]:
    return tuple([get() for get in _GETTERS])
