"""Attention within packed sequences by kernels of our own: dropout that costs three instructions per score.

`attend` chooses: these kernels for 16 bit numbers on a CUDA device, the code of ``bert_packing`` for
everything else. Triton is imported with the first call that needs it. For the compiler forward and backward are
operators of their own, into which it does not look; what dropout needs is drawn outside, by torch, hence the same state
of torch's generator gives the same zeros, also when a checkpoint computes a layer again.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetx.applications.bert_packing import Packing, packed_attention
from fleetx.applications.own_kernels import HAS_TRITON, on_device_of
from fleetx.numbers import LOW_PRECISION

IS_POSSIBLE = HAS_TRITON and torch.version.hip is None
"""And a device of NVIDIA's: a line of the kernels is written in its assembly language."""
WIDTHS = (16, 32, 64, 128)
GRANULE = 64
"""Keys whose random words are drawn; blocks of keys are multiples of it."""
LARGEST_BLOCK = 128
RANDOM_WORDS = 2**32


@dataclass(frozen=True)
class Blocks:
    """How a kernel cuts its work: queries and keys at once, warps of a program, loads in flight, registers at most."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """What Triton is told besides the arguments."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


@dataclass(frozen=True)
class Tuning:
    """The blocks of each kernel, as measured on an H200 for heads of width 64."""

    forward: Blocks = Blocks(64, 64, 4, 3)
    keys: Blocks = Blocks(64, 64, 4, 3)
    queries: Blocks = Blocks(64, 64, 4, 3)
    rows: int = 32


H200 = Tuning()
WIDE = Tuning(forward=Blocks(128, 64, 8, 2), keys=Blocks(64, 64, 4, 1), queries=Blocks(64, 64, 4, 1))
"""For heads of width 128, whose sums take twice the registers."""

SWEEP = {
    "forward": [Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 4)],
    "keys": [Blocks(64, 128, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 3), Blocks(32, 128, 4, 3)],
    "queries": [Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 4)],
}
"""What is worth measuring on a new device, for each kernel."""


def tuning_for(width: int) -> Tuning:
    """The blocks for heads of this width."""
    return WIDE if width > 64 else H200


# Dropout.


def dropout_threshold(dropout: float) -> int:
    """The signed 32 bit number below which a product of words drops its score."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}: nothing else leaves an expectation.")
    return min(round(dropout * RANDOM_WORDS), RANDOM_WORDS - 1) - RANDOM_WORDS // 2


def keep_probability(dropout: float) -> float:
    """The probability of a score to survive that `dropout` really has: the nearest multiple of 2**-32."""
    return 0.5 - dropout_threshold(dropout) / RANDOM_WORDS


def pitch_for(longest: int) -> int:
    """Entries that a sequence has in tensors with one number per row."""
    return (longest + LARGEST_BLOCK - 1) // LARGEST_BLOCK * LARGEST_BLOCK


def draw_words(sequences: int, heads: int, longest: int, dropout: float, device: torch.device) -> Tensor:
    """The random words of one layer's dropout, from torch's generator of the device; none without dropout."""
    size = (sequences, heads, GRANULE + pitch_for(longest)) if dropout else (0,)
    return random_words(size, device)


def random_words(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Words of 32 bits, from torch's generator of the device."""
    half = RANDOM_WORDS // 2
    return torch.randint(-half, half, size, dtype=torch.int32, device=device)


def survivors(words: Tensor, dropout: float) -> Tensor:
    """Which scores survive, (sequences, heads, pitch, pitch), of queries and keys: for tests and for the curious."""
    n, heads, pitch = words.shape[0], words.shape[1], words.shape[2] - GRANULE
    result = words.new_empty((n, heads, pitch, pitch), dtype=torch.int8)
    with on_device_of(words):
        grid = (pitch // LARGEST_BLOCK, n * heads)
        _kernels().survivors_kernel[grid](words, result, pitch, dropout_threshold(dropout), ROWS=LARGEST_BLOCK)
    return result.bool()


# Launches.


def _kernels() -> Any:
    from fleetx.applications import packed_attention_kernels

    return packed_attention_kernels


def _strides(*tensors: Tensor) -> list[int]:
    """Those of tokens and heads."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _blocks(longest: int, size: int) -> int:
    return (longest + size - 1) // size


@dataclass(frozen=True)
class Packed:
    """The tensors of one call: (tokens, heads, width) with any strides but the last, and what goes with them."""

    query: Tensor
    key: Tensor
    value: Tensor
    starts: Tensor
    words: Tensor
    longest: int
    dropout: float

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.starts.shape[0] - 1

    @property
    def heads(self) -> int:
        """How many there are."""
        return self.query.shape[1]

    @property
    def width(self) -> int:
        """That of a head."""
        return self.query.shape[2]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.query.numel() == 0 or self.sequences == 0

    @property
    def scale(self) -> float:
        """What scores are multiplied with before softmax."""
        return self.width**-0.5

    @property
    def boost(self) -> float:
        """What makes up for the scores that are dropped."""
        return 1.0 / keep_probability(self.dropout)

    def out(self) -> Tensor:
        """Memory for (tokens, heads, width), contiguous."""
        return self.query.new_empty(self.query.shape)

    def rows(self) -> Tensor:
        """Memory for one fp32 number per query."""
        return self.query.new_empty((self.sequences, self.heads, pitch_for(self.longest)), dtype=torch.float32)

    def constants(self, blocks: Blocks) -> dict[str, Any]:
        """What a kernel is compiled for."""
        return {
            "WIDTH": self.width,
            "QUERIES": blocks.queries,
            "KEYS": blocks.keys,
            "DROPOUT": self.dropout > 0,
            **blocks.options(),
        }


def launch_forward(call: Packed, out: Tensor, lse: Tensor, blocks: Blocks) -> None:
    """What every query gathers, and the logarithms of its row's sum."""
    grid = (_blocks(call.longest, blocks.queries), call.heads, call.sequences)
    _kernels().forward_kernel[grid](
        call.query, call.key, call.value, call.words, call.starts, out, lse, lse.shape[-1],
        *_strides(call.query, call.key, call.value), call.scale * math.log2(math.e), dropout_threshold(call.dropout),
        call.boost, **call.constants(blocks),
    )  # fmt: skip


def launch_rows(
    call: Packed, grad: Tensor, out: Tensor, lse: Tensor, row_lse: Tensor, delta: Tensor, at_once: int
) -> None:
    """What the other kernels of the backward need of each row."""
    grid = (_blocks(lse.shape[-1], at_once), call.heads, call.sequences)
    _kernels().rows_kernel[grid](
        grad, out, call.starts, lse, row_lse, delta, lse.shape[-1], keep_probability(call.dropout),
        WIDTH=call.width, ROWS=at_once,
    )  # fmt: skip


def launch_keys(
    call: Packed, grad: Tensor, row_lse: Tensor, delta: Tensor, grad_key: Tensor, grad_value: Tensor, blocks: Blocks
) -> None:
    """The gradients of keys and values."""
    grid = (_blocks(call.longest, blocks.keys), call.heads, call.sequences)
    _kernels().keys_kernel[grid](
        call.query, call.key, call.value, call.words, call.starts, row_lse, delta, grad, grad_key, grad_value,
        delta.shape[-1], *_strides(call.query, call.key, call.value, grad_key, grad_value),
        call.scale * math.log2(math.e), call.scale * call.boost, dropout_threshold(call.dropout), call.boost,
        **call.constants(blocks),
    )  # fmt: skip


def launch_queries(
    call: Packed, grad: Tensor, row_lse: Tensor, delta: Tensor, grad_query: Tensor, blocks: Blocks
) -> None:
    """The gradients of queries."""
    grid = (_blocks(call.longest, blocks.queries), call.heads, call.sequences)
    _kernels().queries_kernel[grid](
        call.query, call.key, call.value, call.words, call.starts, row_lse, delta, grad, grad_query, delta.shape[-1],
        *_strides(call.query, call.key, call.value, grad_query), call.scale * math.log2(math.e),
        call.scale * call.boost, dropout_threshold(call.dropout), **call.constants(blocks),
    )  # fmt: skip


def run_forward(call: Packed, tuning: Tuning | None = None) -> tuple[Tensor, Tensor]:
    """The output and the logarithms of the rows' sums."""
    tuning = tuning or tuning_for(call.width)
    out, lse = call.out(), call.rows().zero_()  # rows that nobody has would differ from run to run
    if not call.empty:
        with on_device_of(out):
            launch_forward(call, out, lse, tuning.forward)
    return out, lse


def run_backward(
    call: Packed, grad: Tensor, out: Tensor, lse: Tensor, gradients: list[Tensor], tuning: Tuning | None = None
) -> None:
    """Writes the gradients of queries, keys and values."""
    if call.empty:
        return
    tuning = tuning or tuning_for(call.width)
    row_lse, delta = call.rows(), call.rows()
    grad = grad.contiguous()
    grad_query, grad_key, grad_value = gradients
    with on_device_of(out):
        launch_rows(call, grad, out, lse, row_lse, delta, tuning.rows)
        launch_keys(call, grad, row_lse, delta, grad_key, grad_value, tuning.keys)
        launch_queries(call, grad, row_lse, delta, grad_query, tuning.queries)


# The operators.


def _plain(tensor: Tensor) -> Tensor:
    """With the numbers of a head one after the other, as the kernels need them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _empty_rows(query: Tensor, starts: Tensor, longest: int) -> Tensor:
    return query.new_empty((starts.shape[0] - 1, query.shape[1], pitch_for(longest)), dtype=torch.float32)


@torch.library.custom_op("fleetx::packed_attention", mutates_args=())
def packed_attention_op(
    qkv: Tensor, starts: Tensor, words: Tensor, longest: int, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attention of one (tokens, 3, heads, width) tensor of queries, keys and values."""
    query, key, value = _plain(qkv).unbind(1)
    return run_forward(Packed(query, key, value, starts, words, longest, dropout))


@packed_attention_op.register_fake
def _(qkv: Tensor, starts: Tensor, words: Tensor, longest: int, dropout: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    tokens, _, heads, width = qkv.shape
    return qkv.new_empty((tokens, heads, width)), _empty_rows(qkv[:, 0], starts, longest)


@torch.library.custom_op("fleetx::packed_attention_backward", mutates_args=())
def packed_attention_backward_op(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, starts: Tensor, words: Tensor, longest: int, dropout: float
) -> Tensor:
    """The gradient of queries, keys and values, in one tensor like theirs."""
    gradient = qkv.new_empty(qkv.shape)
    query, key, value = _plain(qkv).unbind(1)
    call = Packed(query, key, value, starts, words, longest, dropout)
    run_backward(call, grad, out, lse, list(gradient.unbind(1)))
    return gradient


@packed_attention_backward_op.register_fake
def _(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, starts: Tensor, words: Tensor, longest: int, dropout: float  # noqa: ARG001
) -> Tensor:  # fmt: skip
    return qkv.new_empty(qkv.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.dropout = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, out, lse)


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    qkv, starts, words, out, lse = ctx.saved_tensors
    gradient = packed_attention_backward_op(grad, qkv, out, lse, starts, words, ctx.longest, ctx.dropout)
    return gradient, None, None, None, None


packed_attention_op.register_autograd(_gradient, setup_context=_keep)


# The choice.


def has_kernels_for(projected: Tensor) -> bool:
    """Whether the kernels serve such tensors."""
    return IS_POSSIBLE and projected.is_cuda and projected.dtype in LOW_PRECISION and projected.shape[-1] in WIDTHS


def attend(qkv: Tensor, packing: Packing, dropout: float) -> Tensor:
    """Each token's attention to the tokens of its own sequence, (tokens, heads, width of a head).

    `qkv` is (tokens, 3, heads, width): queries, keys and values as one projection gives them. Its gradient comes in one
    piece, too.
    """
    if not has_kernels_for(qkv):
        query, key, value = qkv.unbind(1)
        return packed_attention(query, key, value, packing, dropout)
    n, longest = packing.shape
    words = draw_words(n, qkv.shape[2], longest, dropout, qkv.device)
    return packed_attention_op(qkv, packing.starts, words, longest, dropout)[0]
