"""Sums over all rows, taken by kernels that read these rows for something else.

Rows are cut into shares; a program adds up its own, always in the same order, and leaves the sums to a second step. So
results repeat bit by bit, and all of a device is busy however few columns there are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fleetx.applications import own_kernels

_ROWS, _COLUMNS = 256, 32  # sums that a program of the second step reads at once


class Shares(NamedTuple):
    """How rows are cut: so many shares of so many rows, the last one maybe shorter."""

    count: int
    rows: int


def shares_of(rows: int, at_once: int, most: int) -> Shares:
    """At most so many shares, each of no fewer rows than a program reads `at_once`."""
    share = max(at_once, -(-rows // max(1, most)))
    return Shares(-(-rows // share), share)


def room_for(sums: int, shares: Shares, columns: int, device: torch.device) -> Tensor:
    """Where programs leave their sums, each of them for every column: (sums, shares, columns)."""
    return torch.empty((sums, shares.count, columns), dtype=torch.float32, device=device)


def totals(partial: Tensor) -> tuple[Tensor, ...]:
    """The sums of all shares, in fp32."""
    from fleetx.applications import column_sums_kernels

    kernel: Any = column_sums_kernels.totals_kernel
    sums, shares, columns = partial.shape
    result = partial.new_empty((sums, columns))
    with own_kernels.on_device_of(partial):
        kernel[(-(-columns // _COLUMNS), sums)](
            partial, result, shares, columns, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
        )
    return result.unbind(0)


def by_torch(tensor: Tensor) -> Tensor:
    """The sums of all but the last dimension by torch's operations, which may be differentiated once more."""
    return tensor.sum(tuple(range(tensor.dim() - 1)))
