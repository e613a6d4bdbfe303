"""A Triton kernel for the gradients of a norm's weight and bias. Imported only where it is used.

Both are sums over all rows. Each program adds up some rows of some columns, always in the same order, and leaves its
sums to a second step: results repeat bit by bit, and all of the device is busy however few columns there are.
"""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, N803

import triton
import triton.language as tl


@triton.jit
def parameter_gradients_kernel(
    gradient, input, means, deviations, partial, rows, columns, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The sums of `share` rows: of the weight at `partial`, (shares, columns), and of the bias behind all of those.

    `deviations` are reciprocal ones; all four inputs are contiguous.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, rows)
    weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    is_column = column[None, :] < columns
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < end
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        mask = is_row[:, None] & is_column
        slope = tl.load(gradient + place, mask, other=0.0).to(tl.float32)
        value = tl.load(input + place, mask, other=0.0).to(tl.float32)
        mean = tl.load(means + row, is_row, other=0.0)
        deviation = tl.load(deviations + row, is_row, other=0.0)
        weight += slope * ((value - mean[:, None]) * deviation[:, None])
        bias += slope
    out = partial + tl.program_id(1) * columns + column
    tl.store(out, tl.sum(weight, 0), column < columns)
    tl.store(out + tl.num_programs(1) * columns, tl.sum(bias, 0), column < columns)
