"""Triton kernels of attention within packed sequences, with dropout. Imported only where they are used.

Sequences lie one after the other, (tokens, heads, width); ``starts`` says where each begins and the last one ends. The
grid is made for the longest sequence there may be, and a program whose rows lie beyond its sequence leaves at once: the
host need not know the lengths. Rows beyond the end of a sequence are read as its last one, which needs no mask, and
then weighted with zero. Softmax is taken in powers of two and in fp32; ``lse`` is the base-2 logarithm of each row's
sum, so that the backward computes probabilities again instead of reading them.

Dropout costs three instructions per score: a multiplication, a comparison and the selection. Every query of a head has
a random word of 32 bits, and so has every key; the score of the two is dropped when the low 32 bits of the product of
their words lie below a threshold. The words of queries are drawn, and so are those of the first `GRANULE` keys of a
head; the next ones have those words times `STEP`, then times its square, and so on: powers of a multiplier of good
lattice structure (L'Ecuyer, 1999). Hence the forward needs no words but those of one granule, which stay in registers,
and multiplies its queries' words by `STEP` to proceed. Products know of no blocks: forward and backward may cut their
work differently.

In the backward the programs of keys hold scores transposed, (keys, queries): the sums over queries then have their left
factor in registers. Programs of keys and programs of queries both compute the scores again; one that does it once for
both, with the gradients of queries added up in memory, took 1.4 times as long on an H200. Everything is always added in
the same order: results repeat bit by bit.

| tensor | type | shape |
|---|---|---|
| ``starts`` | int32 | (sequences + 1,) |
| ``words`` | int32 | (sequences, heads, `GRANULE` + pitch): of keys, then of queries |
| ``lse``, ``row_lse``, ``delta`` | fp32 | (sequences, heads, pitch) |

The pitch is the length of the longest sequence there may be, rounded up to a multiple of every block.
"""

# Arguments are Triton's own, and those in capital letters are compile-time constants.
# ruff: noqa: ANN001, ANN201, ANN202, N803

import triton
import triton.language as tl
from triton import knobs

from fleetx.applications import packed_attention

GRANULE = tl.constexpr(packed_attention.GRANULE)
STEP = tl.constexpr(741103597)
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _bounds(starts, sequence):
    """Where a sequence begins, and its length."""
    begin = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    return begin.to(tl.int64), end - begin


@triton.jit
def _tile(memory, rows, length, stride, WIDTH: tl.constexpr):
    """Rows of one head."""
    rows = tl.minimum(rows, length - 1)
    return tl.load(memory + rows[:, None] * stride + tl.arange(0, WIDTH)[None, :])


@triton.jit
def _store_tile(memory, rows, length, stride, values, WIDTH: tl.constexpr):
    pointers = memory + rows[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(pointers, values.to(memory.dtype.element_ty), mask=(rows < length)[:, None])


# Dropout.


@triton.jit
def _first_key_words(words, KEYS: tl.constexpr):
    """The words of the first block of keys."""
    lanes = tl.arange(0, KEYS)
    word = tl.load(words + lanes % GRANULE)
    for granule in tl.static_range(1, KEYS // GRANULE):
        word = tl.where(lanes >= granule * GRANULE, word * STEP, word)
    return word


@triton.jit
def _advanced(word, KEYS: tl.constexpr):
    """A word of the next block."""
    for _ in tl.static_range(KEYS // GRANULE):
        word *= STEP
    return word


@triton.jit
def _survivors(weights, row_word, column_word, threshold):
    """The weights with zeros where they are dropped."""
    row_word, column_word = row_word[:, None], column_word[None, :]
    if INTERPRETED:
        return tl.where(row_word * column_word >= threshold, weights, 0.0)
    # Written out, since the compiler would compare long before it selects and keep all the answers in between, or
    # select after rounding to 16 bits, where two numbers share a register: either takes twice the instructions.
    return tl.inline_asm_elementwise(
        """{
        .reg .pred kept;
        .reg .s32 product;
        mul.lo.s32 product, $2, $3;
        setp.ge.s32 kept, product, $4;
        selp.f32 $0, $1, 0f00000000, kept;
        }""",
        "=f,f,r,r,r", [weights, row_word, column_word, threshold], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


# The forward.


@triton.jit
def _look(
    gathered, top, total, q, query_word, key_word, keys, values, start, length, key_token, value_token,
    scale, threshold,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, DROPOUT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Let a block of queries look at one block of keys; only the `LAST` one may reach beyond the sequence."""
    at = start + tl.arange(0, KEYS)
    end = start + KEYS
    if LAST:
        end = length
    k = _tile(keys, at, end, key_token, WIDTH)
    v = _tile(values, at, end, value_token, WIDTH)
    scores = tl.dot(q, tl.trans(k))
    if LAST:
        scores = tl.where((at < length)[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, axis=1)
    if DROPOUT:
        weights = _survivors(weights, query_word, key_word, threshold)
    gathered = tl.dot(weights.to(v.dtype), v, gathered * shrink[:, None])
    return gathered, new_top, total


@triton.jit(do_not_specialize=["threshold"])
def forward_kernel(
    query, key, value, words, starts, out, lse, pitch,
    query_token, query_head, key_token, key_head, value_token, value_head, scale, threshold, boost,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """What one block of queries gathers from its sequence, in one head; `boost` makes up for what is dropped."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    begin, length = _bounds(starts, tl.program_id(2))
    first = tl.program_id(0) * QUERIES
    if first >= length:
        return
    at = first + tl.arange(0, QUERIES)
    line = tl.program_id(2).to(tl.int64) * heads + head
    key += begin * key_token + head * key_head
    value += begin * value_token + head * value_head
    q = _tile(query + begin * query_token + head * query_head, at, length, query_token, WIDTH)
    query_word = at
    key_word = tl.arange(0, KEYS)
    if DROPOUT:
        words += line * (GRANULE + pitch)
        query_word = tl.load(words + GRANULE + at)
        key_word = _first_key_words(words, KEYS)
    gathered = tl.zeros((QUERIES, WIDTH), tl.float32)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    last = (length - 1) // KEYS * KEYS
    for start in tl.range(0, last, KEYS):
        gathered, top, total = _look(
            gathered, top, total, q, query_word, key_word, key, value, start, length, key_token, value_token,
            scale, threshold, KEYS, WIDTH, DROPOUT, False,
        )  # fmt: skip
        query_word = _advanced(query_word, KEYS)
    for start in tl.range(last, length, KEYS):
        gathered, top, total = _look(
            gathered, top, total, q, query_word, key_word, key, value, start, length, key_token, value_token,
            scale, threshold, KEYS, WIDTH, DROPOUT, True,
        )  # fmt: skip
    tl.store(lse + line * pitch + at, top + tl.log2(total))
    gathered = gathered * (boost / total)[:, None]
    _store_tile(out + (begin * heads + head) * WIDTH, at, length, heads * WIDTH, gathered, WIDTH)


# The backward. With P the probabilities, Z P those that survive and D = dO V^T: dV = boost (Z P)^T dO, and the gradient
# of the scores is boost (Z P D - P delta), where delta is the sum of dO O over a row, divided by the boost.


@triton.jit
def rows_kernel(grad, out, starts, lse, row_lse, delta, pitch, keep, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """What the backward needs of each query: its lse, and delta, the sum of gradient times output, times `keep`.

    Beyond the end of a sequence the lse is infinite: every weight is zero there, and nobody needs a mask.
    """
    head, heads = tl.program_id(1), tl.num_programs(1)
    begin, length = _bounds(starts, tl.program_id(2))
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = (tl.program_id(2).to(tl.int64) * heads + head) * pitch + at
    inside = at < length
    offsets = (begin * heads + head) * WIDTH + at[:, None] * (heads * WIDTH) + tl.arange(0, WIDTH)[None, :]
    g = tl.load(grad + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    o = tl.load(out + offsets, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(delta + place, tl.sum(g * o, axis=1) * keep)
    tl.store(row_lse + place, tl.load(lse + place, mask=inside, other=float("inf")))


@triton.jit(do_not_specialize=["threshold"])
def keys_kernel(
    query, key, value, words, starts, lse, delta, grad, grad_key, grad_value, pitch,
    query_token, query_head, key_token, key_head, value_token, value_head,
    grad_key_token, grad_key_head, grad_value_token, grad_value_head,
    scale, factor, threshold, boost,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    begin, length = _bounds(starts, tl.program_id(2))
    start = tl.program_id(0) * KEYS
    if start >= length:
        return
    own = start + tl.arange(0, KEYS)
    line = tl.program_id(2).to(tl.int64) * heads + head
    query += begin * query_token + head * query_head
    grad += (begin * heads + head) * WIDTH
    lse += line * pitch
    delta += line * pitch
    k = _tile(key + begin * key_token + head * key_head, own, length, key_token, WIDTH)
    v = _tile(value + begin * value_token + head * value_head, own, length, value_token, WIDTH)
    key_word = tl.arange(0, KEYS)
    if DROPOUT:
        words += line * (GRANULE + pitch)
        key_word = _first_key_words(words, KEYS)
        words += GRANULE
        for _ in tl.range(0, tl.program_id(0), num_stages=1):
            key_word = _advanced(key_word, KEYS)
    to_keys = tl.zeros((KEYS, WIDTH), tl.float32)
    to_values = tl.zeros((KEYS, WIDTH), tl.float32)
    for first in tl.range(0, length, QUERIES):
        at = first + tl.arange(0, QUERIES)
        q = _tile(query, at, length, query_token, WIDTH)
        g = _tile(grad, at, length, heads * WIDTH, WIDTH)
        # Keys beyond the end get gradients too, which nobody stores.
        weights = tl.exp2(tl.dot(k, tl.trans(q)) * scale - tl.load(lse + at)[None, :])
        survived = weights
        if DROPOUT:
            survived = _survivors(weights, key_word, tl.load(words + at), threshold)
        to_weights = tl.dot(v, tl.trans(g))
        to_values = tl.dot(survived.to(g.dtype), g, to_values)
        to_scores = survived * to_weights - weights * tl.load(delta + at)[None, :]
        to_keys = tl.dot(to_scores.to(q.dtype), q, to_keys)
    grad_key += begin * grad_key_token + head * grad_key_head
    grad_value += begin * grad_value_token + head * grad_value_head
    _store_tile(grad_key, own, length, grad_key_token, to_keys * factor, WIDTH)
    _store_tile(grad_value, own, length, grad_value_token, to_values * boost, WIDTH)


@triton.jit
def _query_part(
    gathered, q, g, query_word, key_word, row_lse, row_delta, keys, values, start, length, key_token, value_token,
    scale, threshold,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, DROPOUT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Add what one block of keys gives to the gradients of a block of queries."""
    at = start + tl.arange(0, KEYS)
    end = start + KEYS
    if LAST:
        end = length
    k = _tile(keys, at, end, key_token, WIDTH)
    v = _tile(values, at, end, value_token, WIDTH)
    weights = tl.exp2(tl.dot(q, tl.trans(k)) * scale - row_lse[:, None])
    if LAST:
        weights = tl.where((at < length)[None, :], weights, 0.0)
    survived = weights
    if DROPOUT:
        survived = _survivors(weights, query_word, key_word, threshold)
    to_scores = survived * tl.dot(g, tl.trans(v)) - weights * row_delta[:, None]
    return tl.dot(to_scores.to(k.dtype), k, gathered)


@triton.jit(do_not_specialize=["threshold"])
def queries_kernel(
    query, key, value, words, starts, lse, delta, grad, grad_query, pitch,
    query_token, query_head, key_token, key_head, value_token, value_head, grad_query_token, grad_query_head,
    scale, factor, threshold,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    begin, length = _bounds(starts, tl.program_id(2))
    first = tl.program_id(0) * QUERIES
    if first >= length:
        return
    at = first + tl.arange(0, QUERIES)
    line = tl.program_id(2).to(tl.int64) * heads + head
    key += begin * key_token + head * key_head
    value += begin * value_token + head * value_head
    q = _tile(query + begin * query_token + head * query_head, at, length, query_token, WIDTH)
    g = _tile(grad + (begin * heads + head) * WIDTH, at, length, heads * WIDTH, WIDTH)
    row_lse = tl.load(lse + line * pitch + at)
    row_delta = tl.load(delta + line * pitch + at)
    query_word = at
    key_word = tl.arange(0, KEYS)
    if DROPOUT:
        words += line * (GRANULE + pitch)
        query_word = tl.load(words + GRANULE + at)
        key_word = _first_key_words(words, KEYS)
    gathered = tl.zeros((QUERIES, WIDTH), tl.float32)
    last = (length - 1) // KEYS * KEYS
    for start in tl.range(0, last, KEYS):
        gathered = _query_part(
            gathered, q, g, query_word, key_word, row_lse, row_delta, key, value, start, length,
            key_token, value_token, scale, threshold, KEYS, WIDTH, DROPOUT, False,
        )  # fmt: skip
        query_word = _advanced(query_word, KEYS)
    for start in tl.range(last, length, KEYS):
        gathered = _query_part(
            gathered, q, g, query_word, key_word, row_lse, row_delta, key, value, start, length,
            key_token, value_token, scale, threshold, KEYS, WIDTH, DROPOUT, True,
        )  # fmt: skip
    grad_query += begin * grad_query_token + head * grad_query_head
    _store_tile(grad_query, at, length, grad_query_token, gathered * factor, WIDTH)


@triton.jit(do_not_specialize=["threshold"])
def survivors_kernel(words, survivors, pitch, threshold, ROWS: tl.constexpr):
    """Writes which scores are not dropped, (sequences, heads, pitch, pitch): for tests, which compare with it."""
    line = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words += line * (GRANULE + pitch)
    query_word = tl.load(words + GRANULE + at)
    key_word = _first_key_words(words, GRANULE)
    lanes = tl.arange(0, GRANULE)
    ones = tl.full((ROWS, GRANULE), 1.0, tl.float32)
    for start in tl.range(0, pitch, GRANULE):
        pointers = survivors + (line * pitch + at[:, None]) * pitch + start + lanes[None, :]
        tl.store(pointers, _survivors(ones, query_word, key_word, threshold).to(tl.int8))
        query_word = _advanced(query_word, GRANULE)
