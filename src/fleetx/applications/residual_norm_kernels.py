"""Triton kernels for the end of a half layer. Imported only where they are used."""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl


@triton.jit
def _thinned(value, words, row, column, rows, columns, threshold, keep):
    """`value` with zeros where the product of the words of its row and its column lies below the threshold."""
    of_rows = tl.load(words + row, row < rows, other=0)
    of_columns = tl.load(words + rows + column, column < columns, other=0)
    return tl.where(of_rows[:, None] * of_columns[None, :] >= threshold, value / keep, 0.0)


@triton.jit(do_not_specialize=["rows", "threshold"])
def residual_norm_kernel(
    projected,
    bias,
    shortcut,
    words,
    weight,
    norm_bias,
    summed,
    output,
    means,
    deviations,
    rows,
    columns,
    threshold,
    keep,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`summed`, (rows, columns), contiguous like all others, and the norm of each row; `words` may be None.

    `deviations` are reciprocal ones.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_row, is_column = row < rows, column < columns
    mask = is_row[:, None] & is_column[None, :]
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    value = tl.load(projected + place, mask, other=0.0).to(tl.float32)
    value += tl.load(bias + column, is_column, other=0.0).to(tl.float32)[None, :]
    if words is not None:
        value = _thinned(value, words, row, column, rows, columns, threshold, keep)
    value += tl.load(shortcut + place, mask, other=0.0).to(tl.float32)
    low = value.to(summed.dtype.element_ty)
    tl.store(summed + place, low, mask)
    # Of what the backward will see: the rounded sum.
    value = low.to(tl.float32)
    mean = tl.sum(tl.where(mask, value, 0.0), 1) / columns
    centred = tl.where(mask, value - mean[:, None], 0.0)
    deviation = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / columns + eps)
    tl.store(means + row, mean, is_row)
    tl.store(deviations + row, deviation, is_row)
    scale = tl.load(weight + column, is_column, other=0.0).to(tl.float32)
    offset = tl.load(norm_bias + column, is_column, other=0.0).to(tl.float32)
    normal = centred * deviation[:, None] * scale[None, :] + offset[None, :]
    tl.store(output + place, normal.to(output.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows", "share", "threshold"])
def residual_norm_backward_kernel(
    gradient,
    summed,
    means,
    deviations,
    weight,
    words,
    of_sum,
    of_projected,
    partial,
    rows,
    columns,
    share,
    threshold,
    keep,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What reaches the sum, and through dropout the projection, which is the same without `words`.

    Over `share` rows, whose sums go to `partial`, (3, shares, columns): of the norm's weight, its bias, and the bias of
    the projection.
    """
    column = tl.arange(0, COLUMNS)
    is_column = column < columns
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, rows)
    scale = tl.load(weight + column, is_column, other=0.0).to(tl.float32)[None, :]
    of_weight = tl.zeros((COLUMNS,), tl.float32)
    of_norm_bias = tl.zeros((COLUMNS,), tl.float32)
    of_bias = tl.zeros((COLUMNS,), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = row < end
        mask = is_row[:, None] & is_column[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        slope = tl.load(gradient + place, mask, other=0.0).to(tl.float32)
        value = tl.load(summed + place, mask, other=0.0).to(tl.float32)
        mean = tl.load(means + row, is_row, other=0.0)[:, None]
        deviation = tl.load(deviations + row, is_row, other=0.0)[:, None]
        normal = tl.where(mask, (value - mean) * deviation, 0.0)
        of_weight += tl.sum(slope * normal, 0)
        of_norm_bias += tl.sum(slope, 0)
        slope *= scale
        along = tl.sum(slope * normal, 1)[:, None] / columns
        slope = deviation * (slope - tl.sum(slope, 1)[:, None] / columns - normal * along)
        low = slope.to(of_sum.dtype.element_ty)
        tl.store(of_sum + place, low, mask)
        if words is not None:
            thin = _thinned(low.to(tl.float32), words, row, column, rows, columns, threshold, keep)
            low = thin.to(of_sum.dtype.element_ty)
            tl.store(of_projected + place, low, mask)
        of_bias += tl.sum(tl.where(mask, low.to(tl.float32), 0.0), 0)
    out = partial + tl.program_id(0).to(tl.int64) * columns + column
    behind = tl.num_programs(0).to(tl.int64) * columns
    tl.store(out, of_weight, is_column)
    tl.store(out + behind, of_norm_bias, is_column)
    tl.store(out + 2 * behind, of_bias, is_column)
