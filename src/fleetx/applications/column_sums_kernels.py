"""A Triton kernel that adds up the sums of all shares. Imported only where it is used."""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, N803

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["shares"])
def totals_kernel(partial, totals, shares, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums over the shares of `partial`, (sums, shares, columns)."""
    number = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, shares, ROWS):
        share = first + tl.arange(0, ROWS)
        place = (number * shares + share[:, None]) * columns + column[None, :]
        total += tl.load(partial + place, (share < shares)[:, None] & is_column[None, :], other=0.0)
    tl.store(totals + number * columns + column, tl.sum(total, 0), is_column)
