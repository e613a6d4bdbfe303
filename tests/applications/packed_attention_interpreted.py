"""The very kernels, run by Triton's interpreter on the host. `test_kernels` starts pytest on this file.

TRITON_INTERPRET must be set before Triton is imported, and is then set for the whole process: hence one of its own. The
interpreter cannot multiply matrices of bf16, so everything here is fp16.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fleetx.applications import packed_attention as ours
from fleetx.applications import packed_attention_kernels
from fleetx.applications.packed_attention import Blocks, Tuning
from tests.interpreting import scalars_count  # noqa: F401 - a fixture of all tests here

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, about products of words that do not fit
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]

SMALL = Tuning(Blocks(64, 64, 4, 1), Blocks(64, 64, 4, 1), Blocks(64, 64, 4, 1))
LARGE = Tuning(Blocks(128, 128, 8, 1), Blocks(32, 128, 8, 1), Blocks(128, 128, 8, 1))
UNEVEN = Tuning(Blocks(128, 64, 8, 1), Blocks(64, 128, 4, 1), Blocks(128, 64, 4, 1), rows=128)
FORMS = {"small": SMALL, "large": LARGE, "uneven": UNEVEN}
HEADS = 2


def starts_of(lengths):
    return functional.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0)).int()


def drawn(lengths, width=16, sharpness=1.0):
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, HEADS, width)
    qkv[:, 0] *= sharpness
    return qkv.half()


def plain_attention(qkv, starts, mask=None, keep=1.0):
    """One sequence after the other, all in the dtype of the input."""
    outs = [qkv.new_empty((0, *qkv.shape[2:]))]
    for number, (begin, end) in enumerate(pairwise(starts.tolist())):
        query, key, value = qkv[begin:end].unbind(1)
        weights = torch.einsum("qhw,khw->hqk", query, key).div(math.sqrt(qkv.shape[-1])).softmax(-1)
        if mask is not None:
            weights = weights * mask[number, :, : end - begin, : end - begin] / keep
        outs.append(torch.einsum("hqk,khw->qhw", weights, value))
    return torch.cat(outs)


def check(lengths, longest, dropout, tuning, width=16, sharpness=1.0):
    qkv, starts = drawn(lengths, width, sharpness), starts_of(lengths)
    words = ours.draw_words(len(lengths), HEADS, longest, dropout, qkv.device)
    call = ours.Packed(*qkv.unbind(1), starts, words, longest, dropout)
    out, lse = ours.run_forward(call, tuning)
    grad, gradient = torch.randn_like(out), torch.full_like(qkv, float("nan"))
    ours.run_backward(call, grad, out, lse, list(gradient.unbind(1)), tuning)
    mask = ours.survivors(words, dropout) if dropout else None
    exact = qkv.double().requires_grad_()
    expected = plain_attention(exact, starts, mask, ours.keep_probability(dropout))
    expected.backward(grad.double())
    # Weights, their gradients and the output have 11 bits; differences of such numbers are what q and k get.
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=2e-3, atol=3e-3 * max(1.0, sharpness))


def test_kernels_are_interpreted():
    assert packed_attention_kernels.INTERPRETED.value


@pytest.mark.parametrize(
    ("form", "dropout"), [("small", 0.0), ("small", 0.1), ("large", 0.6), ("uneven", 0.0), ("uneven", 0.4)]
)
def test_ragged_sequences_have_the_output_and_gradients_of_the_formula(form, dropout):
    check([70, 1, 130], 140, dropout, FORMS[form])


@pytest.mark.parametrize(
    ("form", "lengths", "longest"),
    [
        ("small", [1], 1),
        ("large", [3], 512),
        ("small", [64], 64),
        ("uneven", [128], 128),
        ("large", [129], 129),
        ("small", [65, 0, 5], 65),
        ("uneven", [65, 0, 5], 65),
    ],
    ids=str,
)
def test_any_length_within_any_bound(form, lengths, longest):
    check(lengths, longest, 0.2, FORMS[form])


@pytest.mark.parametrize("width", ours.WIDTHS)
def test_every_width_with_its_own_blocks(width):
    check([9, 66], 70, 0.1, ours.tuning_for(width), width)


@pytest.mark.parametrize("form", ["small", "uneven"])
def test_scores_too_large_for_a_naive_softmax(form):
    check([70], 70, 0.1, FORMS[form], sharpness=50.0)


def test_no_tokens_give_no_tokens():
    qkv, starts = drawn([]), starts_of([])
    words = ours.draw_words(0, HEADS, 10, 0.1, qkv.device)
    leaf = qkv.clone().requires_grad_()
    out, _ = ours.packed_attention_op(leaf, starts, words, 10, 0.1)
    out.sum().backward()
    assert out.shape == (0, HEADS, 16)
    assert leaf.grad.shape == qkv.shape


@pytest.mark.parametrize("form", ["small", "uneven"])
def test_nobody_reads_other_sequences_or_beyond_the_end(form):
    lengths = [70, 30, 66]
    starts = starts_of(lengths)
    memory = torch.full((sum(lengths) + 200, 3, HEADS, 16), float("nan")).half()
    memory[: sum(lengths)] = drawn(lengths)
    memory[70:100] = float("nan")
    words = ours.draw_words(3, HEADS, 80, 0.1, memory.device)
    call = ours.Packed(*memory[: sum(lengths)].unbind(1), starts, words, 80, 0.1)
    out, lse = ours.run_forward(call, FORMS[form])
    gradient = torch.zeros_like(memory)
    ours.run_backward(call, torch.randn_like(out), out, lse, list(gradient[: sum(lengths)].unbind(1)), FORMS[form])
    for result in (out, gradient):
        spoiled = result.flatten(1).isnan().any(1)
        assert spoiled[70:100].all()
        assert not spoiled[:70].any()
        assert not spoiled[100:].any()
    assert not gradient[sum(lengths) :].any()


def test_a_view_of_a_wider_tensor_is_taken_as_it_lies():
    lengths = [30, 60]
    qkv, starts = drawn(lengths), starts_of(lengths)
    words = ours.draw_words(2, HEADS, 70, 0.1, qkv.device)
    wider = torch.cat([torch.full_like(qkv, float("nan")), qkv], dim=1)
    grad = torch.randn(90, HEADS, 16).half()
    results = []
    for leaf in (qkv.clone(), wider[:, 3:].detach()):
        out, _ = ours.packed_attention_op(leaf.requires_grad_(), starts, words, 70, 0.1)
        results.append((out.detach(), *torch.autograd.grad(out, leaf, grad)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_heads_that_do_not_lie_in_one_piece_are_copied():
    lengths = [20, 30]
    qkv, starts = drawn(lengths), starts_of(lengths)
    scattered = qkv.transpose(-1, -2).contiguous().transpose(-1, -2)
    none = ours.draw_words(2, HEADS, 30, 0.0, qkv.device)
    found, _ = ours.packed_attention_op(scattered, starts, none, 30, 0.0)
    assert torch.equal(found, ours.packed_attention_op(qkv, starts, none, 30, 0.0)[0])


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_the_operator_keeps_torchs_rules(dropout):
    lengths = [20, 9]
    qkv, starts = drawn(lengths).requires_grad_(), starts_of(lengths)
    words = ours.draw_words(2, HEADS, 20, dropout, qkv.device)
    torch.library.opcheck(ours.packed_attention_op, (qkv, starts, words, 20, dropout), atol=1e-3, rtol=1e-2)


def attention_of(hidden, weight, starts, longest, dropout):
    qkv = functional.linear(hidden, weight).unflatten(-1, (3, HEADS, 16))
    words = ours.draw_words(starts.shape[0] - 1, HEADS, longest, dropout, hidden.device)
    return ours.packed_attention_op(qkv, starts, words, longest, dropout)[0].flatten(1)


def test_a_compiled_layer_takes_any_number_of_tokens_with_one_compilation():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_of, backend=counter)
    torch.manual_seed(0)
    weight = (torch.randn(3 * HEADS * 16, 8) * 0.3).half().requires_grad_()
    for lengths in ([20, 9], [11, 7], [3, 2]):
        hidden = torch.randn(sum(lengths), 8).half()
        torch._dynamo.maybe_mark_dynamic(hidden, 0)
        results = []
        for function in (attention_of, compiled):
            torch.manual_seed(5)
            weight.grad = None
            out = function(hidden, weight, starts_of(lengths), 20, 0.2)
            out.square().sum().backward()
            results.append((out.detach(), weight.grad))
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1


def test_a_checkpoint_drops_the_same_scores_again():
    torch.manual_seed(0)
    weight = (torch.randn(3 * HEADS * 16, 8) * 0.3).half()
    hidden = torch.randn(29, 8).half()
    gradients = []
    for again in (False, True):
        torch.manual_seed(5)
        leaf = weight.clone().requires_grad_()
        arguments = (hidden, leaf, starts_of([20, 9]), 20, 0.5)
        out = checkpoint(attention_of, *arguments, use_reentrant=False) if again else attention_of(*arguments)
        out.square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("form", ["small", "uneven"])
def test_results_repeat_bit_by_bit_and_another_seed_gives_others(form):
    lengths = [70]
    qkv, starts = drawn(lengths), starts_of(lengths)
    grad = torch.randn(70, HEADS, 16).half()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        words = ours.draw_words(1, HEADS, 70, 0.1, qkv.device)
        call = ours.Packed(*qkv.unbind(1), starts, words, 70, 0.1)
        out, lse = ours.run_forward(call, FORMS[form])
        gradient = torch.empty_like(qkv)
        ours.run_backward(call, grad, out, lse, list(gradient.unbind(1)), FORMS[form])
        results.append((out, gradient))
    for one, same, other in zip(*results, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


# Statistics of what is dropped: 8 heads of 512 by 512 scores, from two seeds.

DROPPED = 0.1


@pytest.fixture(scope="module")
def masks():
    result = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        result.append(ours.survivors(ours.draw_words(2, 4, 512, DROPPED, torch.device("cpu")), DROPPED))
    return result


def standardized(mask):
    """Mean 0 and variance 1, if the probability is right."""
    return (mask.float() - (1 - DROPPED)) / math.sqrt(DROPPED * (1 - DROPPED))


def deviation(one, other):
    """The correlation of two masks in units of its standard deviation for independent ones."""
    product = standardized(one) * standardized(other)
    return product.double().sum().item() / math.sqrt(product.numel())


def test_the_rate_is_right(masks):
    for mask in masks:
        assert abs(standardized(mask).double().sum().item()) / math.sqrt(mask.numel()) < 4


NEIGHBOURS = {
    "rows": lambda m, _: (m[:, :, 1:], m[:, :, :-1]),
    "columns": lambda m, _: (m[..., 1:], m[..., :-1]),
    "diagonals": lambda m, _: (m[:, :, 1:, 1:], m[:, :, :-1, :-1]),
    "granules of keys": lambda m, _: (m[..., 64:], m[..., :-64]),
    "every other granule of keys": lambda m, _: (m[..., 128:], m[..., :-128]),
    "distant granules of keys": lambda m, _: (m[..., 448:], m[..., :-448]),
    "granules of queries": lambda m, _: (m[:, :, 64:], m[:, :, :-64]),
    "heads": lambda m, _: (m[:, 1:], m[:, :-1]),
    "sequences": lambda m, _: (m[1:], m[:-1]),
    "seeds": lambda m, other: (m, other),
}


@pytest.mark.parametrize("which", NEIGHBOURS)
def test_neighbours_are_dropped_independently(masks, which):
    assert abs(deviation(*NEIGHBOURS[which](*masks))) < 4


def test_a_score_and_its_mirror_image_are_dropped_independently(masks):
    below = torch.ones(512, 512, dtype=torch.bool).tril(-1)
    assert abs(deviation(masks[0][..., below], masks[0].mT[..., below])) < 4


@pytest.mark.parametrize("axis", [-1, -2], ids=["rows", "columns"])
def test_the_dropped_of_a_line_are_as_many_as_of_independent_ones(masks, axis):
    counts = standardized(masks[0]).double().sum(axis).flatten() / math.sqrt(512)
    assert counts.var().item() == pytest.approx(1, abs=0.06)
    assert counts.pow(4).mean().item() == pytest.approx(3, abs=0.4)


@pytest.mark.parametrize("axis", [-1, -2], ids=["rows", "columns"])
def test_all_pairs_of_lines_correlate_as_independent_ones_do(masks, axis):
    lines = standardized(masks[0]).flatten(0, 1)
    lines = lines if axis == -1 else lines.mT
    above = torch.ones(512, 512, dtype=torch.bool).triu(1)
    correlations = (lines @ lines.mT / math.sqrt(512))[:, above].double()
    assert correlations.var().item() == pytest.approx(1, abs=0.02)
    assert correlations.pow(4).mean().item() == pytest.approx(3.1, abs=0.15)
    assert correlations.abs().max().item() < 8  # of a million; 6 to 7 for independent ones


def test_three_corners_of_a_rectangle_do_not_tell_the_fourth(masks):
    mask = standardized(masks[0])
    product = mask[..., ::2, ::2] * mask[..., 1::2, ::2] * mask[..., ::2, 1::2] * mask[..., 1::2, 1::2]
    assert abs(product.double().sum().item()) / math.sqrt(product.numel()) < 4
