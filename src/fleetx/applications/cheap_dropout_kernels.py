"""A Triton kernel for dropout by products of random words. Imported only where it is used."""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, N803

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "threshold"])
def thinned_kernel(input, words, output, rows, columns, threshold, keep, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros in `input`, (rows, columns), contiguous like the output."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    of_rows = tl.load(words + row, is_row, other=0)
    of_columns = tl.load(words + rows + column, is_column, other=0)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    value = tl.load(input + place, mask, other=0.0).to(tl.float32)
    value = tl.where(of_rows[:, None] * of_columns[None, :] >= threshold, value / keep, 0.0)
    tl.store(output + place, value.to(output.dtype.element_ty), mask)
