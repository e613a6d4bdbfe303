"""The kernels of applications; their tests are in files of their own, which one process runs interpreted."""

from pathlib import Path

import pytest

from tests.interpreting import assert_passes_interpreted, needs_triton

HERE = Path(__file__).parent


@pytest.mark.middle
@needs_triton
def test_the_kernels_of_bert_pass_their_tests_in_tritons_interpreter():
    names = "cheap_dropout", "residual_norm", "bias_gradients", "bert_kernels"
    assert_passes_interpreted(*(HERE / f"{name}_interpreted.py" for name in names))


@pytest.mark.full  # the longest of its kind; the device's tests run the kernels themselves
@needs_triton
def test_the_kernels_of_packed_attention_do_too():
    assert_passes_interpreted(HERE / "packed_attention_interpreted.py")
