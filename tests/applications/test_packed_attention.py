"""What the host decides about packed attention; the kernels' own tests are in ``packed_attention_interpreted``."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from fleetx.applications import packed_attention as ours
from fleetx.applications.bert_unpad import pack


@pytest.mark.middle
def test_importing_it_imports_neither_triton_nor_the_compiler():
    program = (
        "import sys, fleetx.applications.packed_attention; "
        "print([m for m in ('triton', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_device_the_plain_code_is_taken():
    torch.manual_seed(0)
    packing = pack((torch.arange(7) < torch.tensor([[7], [3]])).long(), torch.device("cpu"))
    qkv = torch.randn(10, 3, 2, 8)
    found = ours.attend(qkv, packing, 0.0)
    for begin, end in ((0, 7), (7, 10)):
        query, key, value = (part.transpose(0, 1) for part in qkv[begin:end].unbind(1))
        expected = functional.scaled_dot_product_attention(query, key, value).transpose(0, 1)
        torch.testing.assert_close(found[begin:end], expected)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 1e-9, 0.999, 1 - 1e-16])
def test_the_keep_probability_is_that_of_the_threshold(dropout):
    threshold = ours.dropout_threshold(dropout)
    assert -(2**31) <= threshold < 2**31
    kept = 2**31 - threshold  # of 2**32 equally likely words
    assert ours.keep_probability(dropout) == kept / 2**32 > 0
    assert abs(ours.keep_probability(dropout) - (1 - dropout)) <= 2**-32


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_a_dropout_that_leaves_nothing_is_refused(dropout):
    with pytest.raises(ValueError, match=f"at least 0 and below 1, got {dropout}"):
        ours.dropout_threshold(dropout)


def test_blocks_of_keys_are_multiples_of_what_is_drawn_and_divide_the_pitch():
    used = [blocks for own in (ours.H200, ours.WIDE) for blocks in (own.forward, own.keys, own.queries)]
    used += [blocks for candidates in ours.SWEEP.values() for blocks in candidates]
    for blocks in used:
        assert blocks.keys % ours.GRANULE == 0
        assert ours.LARGEST_BLOCK % blocks.queries == ours.LARGEST_BLOCK % blocks.keys == 0


def test_nothing_is_drawn_without_dropout():
    before = torch.get_rng_state()
    assert ours.draw_words(3, 2, 512, 0.0, torch.device("cpu")).numel() == 0
    assert torch.equal(torch.get_rng_state(), before)
