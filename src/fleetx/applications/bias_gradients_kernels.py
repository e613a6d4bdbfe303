"""Triton kernels that take the gradient of a bias on the way. Imported only where they are used."""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl


@triton.jit
def _normal(value):
    """The probability of a normal number to lie below `value`, and sqrt(2 pi) times its density there.

    By Hastings' approximation 26.2.17 in Abramowitz and Stegun, which is off by less than 1e-7, as fp32 itself is: with
    the usual error function these kernels wait for it, and not for memory.
    """
    density = tl.exp2(-0.7213475204444817 * value * value)
    away = 1.0 + 0.2316419 * tl.abs(value)
    near = tl.rsqrt(away * away)  # one instruction, where a division takes eight
    series = 0.127414796 + near * (-0.142248368 + near * (0.7107068705 + near * (-0.7265760135 + near * 0.5307027145)))
    tail = density * near * series
    return tl.where(value >= 0, 1.0 - tail, tail), density


@triton.jit(do_not_specialize=["rows"])
def gelu_kernel(projected, bias, output, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """GELU of `projected`, (rows, columns), contiguous like the output, and a bias."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    mask = (row < rows)[:, None] & is_column[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(projected + place, mask, other=0.0).to(tl.float32)
    value += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    probability, _ = _normal(value)
    tl.store(output + place, (value * probability).to(output.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows", "share"])
def gelu_backward_kernel(
    gradient,
    projected,
    bias,
    output,
    partial,
    rows,
    columns,
    share,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What reaches `projected`; of `share` rows the sums of that go to `partial`, (shares, columns)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, rows)
    added = tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & is_column[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        slope = tl.load(gradient + place, mask, other=0.0).to(tl.float32)
        value = tl.load(projected + place, mask, other=0.0).to(tl.float32) + added
        probability, density = _normal(value)
        low = (slope * (probability + 0.3989422804014327 * value * density)).to(output.dtype.element_ty)
        tl.store(output + place, low, mask)
        total += tl.sum(low.to(tl.float32), 0)
    tl.store(partial + tl.program_id(1) * columns + column, total, is_column)


@triton.jit(do_not_specialize=["rows", "share"])
def joined_kernel(
    first, second, third, output, partial, rows, columns, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Three tensors (rows, columns) side by side; of `share` rows the sums go to `partial`, (shares, 3 · columns)."""
    part = tl.program_id(2)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < columns
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, rows)
    source = first
    if part == 1:
        source = second
    if part == 2:
        source = third
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(begin, end, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        mask = (row < end) & is_column[None, :]
        value = tl.load(source + row * columns + column[None, :], mask, other=0.0)
        tl.store(output + (3 * row + part) * columns + column[None, :], value, mask)
        total += tl.sum(value.to(tl.float32), 0)
    tl.store(partial + (3 * tl.program_id(1) + part) * columns + column, total, is_column)
