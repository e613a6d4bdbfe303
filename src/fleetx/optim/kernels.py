"""Triton kernels over lists of tensors: one launch serves them all. Imported only where they are used.

Here is what LARS and LAMB share; their own kernels are in ``lars_kernels`` and ``lamb_kernels``.

Tensors are cut into chunks, and a program serves one chunk. It finds its tensor and chunk in the table ``blocks`` and
the tensor's memory in tables of addresses, so a list may be of any length and its tensors of any size: offsets are 64
bit. Sums are first taken per chunk, then per tensor, always in the same order: results repeat bit by bit. What a
tensor's programs need to know (decay, bias correction, step length) is prepared by a kernel of a single program, which
also decides on the device whether the step is left out.

Arithmetic is in the dtype of the weights, sums of chunks and everything that exists once per tensor are in fp64.

| table | type | holds |
|---|---|---|
| ``blocks`` | int32, two per chunk | tensor, and the chunk's number within it |
| ``sizes`` | int64 | elements of each tensor |
| ``spans`` | int32 | where each tensor's chunks begin among all, and the end |
| ``sums`` | fp64 | two rows, one entry per tensor |
| ``flags`` | fp64 | whether the step is left out, then the length of all gradients together |
"""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = knobs.runtime.interpret
"""Whether Triton runs kernels in Python, where tensors are on the host."""

DTYPES = {
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
}
SUMMED_AT_ONCE = 1024
DECIDED_AT_ONCE = 256


@triton.jit
def memory(addresses, tensor, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a chunk lies; with `ALIGNED`, at a multiple of 16 bytes, so that four numbers are moved at once."""
    begin = tl.load(addresses + tensor).to(tl.pointer_type(DTYPE))  # pyrefly: ignore
    if ALIGNED:
        begin = tl.multiple_of(begin, 16)
    return begin + start


@triton.jit
def read(pointers, inside, MASKED: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers in `DTYPE`; 0 beyond the end."""
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0).to(DTYPE)
    return tl.load(pointers).to(DTYPE)


@triton.jit
def write(pointers, values, inside, MASKED: tl.constexpr):
    """Write what is not beyond the end."""
    if MASKED:
        tl.store(pointers, values, mask=inside)
    else:
        tl.store(pointers, values)


@triton.jit
def unscaling(grad_scale, SCALED: tl.constexpr):
    """What gradients are multiplied with to be unscaled."""
    factor = tl.full((), 1.0, tl.float64)
    if SCALED:
        factor = 1.0 / tl.load(grad_scale).to(tl.float64)
    return factor


# Masters.


@triton.jit
def _follow(
    weights, low, left, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, MASKED: tl.constexpr,
    WEIGHT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    for turn in tl.static_range(ROUNDS):
        at = turn * BLOCK + tl.arange(0, BLOCK)
        inside = at < left
        p = read(weights + at, inside, MASKED, WEIGHT)
        q = read(low + at, inside, MASKED, WEIGHT)
        write(weights + at, tl.where(p.to(LOW).to(WEIGHT) == q, p, q), inside, MASKED)


@triton.jit(do_not_specialize=["first"])
def follow_kernel(
    blocks, sizes, weight_at, low_at, first,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr, WEIGHT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Give masters the numbers that their low-precision weights have and they do not round to."""
    block = first + tl.program_id(0)
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * (BLOCK * ROUNDS)
    left = tl.load(sizes + tensor) - start
    weights = memory(weight_at, tensor, start, WEIGHT, ALIGNED)
    low = memory(low_at, tensor, start, LOW, ALIGNED)
    if left >= BLOCK * ROUNDS:
        _follow(weights, low, left, BLOCK, ROUNDS, False, WEIGHT, LOW)
    else:
        _follow(weights, low, left, BLOCK, ROUNDS, True, WEIGHT, LOW)


# Sums of squares.


@triton.jit
def _squares(
    weights, gradients, factor, left, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, MASKED: tl.constexpr,
    WEIGHT: tl.constexpr, OF_WEIGHTS: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    of_weights = tl.zeros((BLOCK,), WEIGHT)
    of_gradients = tl.zeros((BLOCK,), WEIGHT)
    for turn in tl.static_range(ROUNDS):
        at = turn * BLOCK + lanes
        inside = at < left
        g = read(gradients + at, inside, MASKED, WEIGHT) * factor
        of_gradients += g * g
        if OF_WEIGHTS:
            p = read(weights + at, inside, MASKED, WEIGHT)
            of_weights += p * p
    return tl.sum(of_weights, axis=0), tl.sum(of_gradients, axis=0)


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["grad_scale"])
def squares_kernel(
    blocks, sizes, weight_at, gradient_at, grad_scale, partials_p, partials_g, first,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr, SCALED: tl.constexpr,
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, OF_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Per chunk: the squares of the weights, and of the unscaled gradients."""
    block = first + tl.program_id(0)
    tensor = tl.load(blocks + 2 * block)
    start = tl.load(blocks + 2 * block + 1).to(tl.int64) * (BLOCK * ROUNDS)
    left = tl.load(sizes + tensor) - start
    weights = memory(weight_at, tensor, start, WEIGHT, ALIGNED)
    gradients = memory(gradient_at, tensor, start, GRADIENT, ALIGNED)
    factor = unscaling(grad_scale, SCALED).to(WEIGHT)
    # Only the last chunk of a tensor is masked: a mask of unknown alignment moves numbers one by one.
    if left >= BLOCK * ROUNDS:
        p, g = _squares(weights, gradients, factor, left, BLOCK, ROUNDS, False, WEIGHT, OF_WEIGHTS)
        tl.store(partials_p + block, p.to(tl.float64))
        tl.store(partials_g + block, g.to(tl.float64))
    else:
        p, g = _squares(weights, gradients, factor, left, BLOCK, ROUNDS, True, WEIGHT, OF_WEIGHTS)
        tl.store(partials_p + block, p.to(tl.float64))
        tl.store(partials_g + block, g.to(tl.float64))


@triton.jit(do_not_specialize=["count"])
def reduce_kernel(spans, partials_p, partials_g, sums, count, AT_ONCE: tl.constexpr):
    """Per tensor: the sums over its chunks."""
    tensor = tl.program_id(0)
    begin = tl.load(spans + tensor)
    end = tl.load(spans + tensor + 1)
    of_p = tl.zeros((AT_ONCE,), tl.float64)
    of_g = tl.zeros((AT_ONCE,), tl.float64)
    at = begin
    while at < end:  # Triton's interpreter cannot count to what was read from memory in a `for`
        index = at + tl.arange(0, AT_ONCE)
        of_p += tl.load(partials_p + index, mask=index < end, other=0.0)
        of_g += tl.load(partials_g + index, mask=index < end, other=0.0)
        at += AT_ONCE
    tl.store(sums + tensor, tl.sum(of_p, axis=0))
    tl.store(sums + count + tensor, tl.sum(of_g, axis=0))


@triton.jit
def _length_of_all(sums, count, AT_ONCE: tl.constexpr):
    squares = tl.zeros((AT_ONCE,), tl.float64)
    at = count * 0
    while at < count:
        index = at + tl.arange(0, AT_ONCE)
        squares += tl.load(sums + count + index, mask=index < count, other=0.0)
        at += AT_ONCE
    return tl.sqrt(tl.sum(squares, axis=0))


@triton.jit
def verdict(
    sums, max_norm, found_inf, flags, count,
    AT_ONCE: tl.constexpr, SKIPPABLE: tl.constexpr, CHECKED: tl.constexpr, CLIPPED: tl.constexpr,
):  # fmt: skip
    """Whether the step is left out, and what clipping multiplies the gradients with."""
    skip = tl.full((), 0.0, tl.float64)
    clip = tl.full((), 1.0, tl.float64)
    if SKIPPABLE:
        skip = tl.where(tl.load(found_inf) != 0, 1.0, 0.0).to(tl.float64)
    if CHECKED or CLIPPED:
        length = _length_of_all(sums, count, AT_ONCE)
        tl.store(flags + 1, length)
        if CHECKED:
            skip = tl.where(length < float("inf"), skip, 1.0)  # not so for inf, nor for NaN
        if CLIPPED:
            limit = tl.load(max_norm)
            longer = length > limit
            clip = tl.where(longer, limit / tl.where(longer, length, 1.0), 1.0)
    tl.store(flags, skip)
    return skip, clip
