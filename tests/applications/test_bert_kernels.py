"""BERT with kernels of its own; the tests are in ``bert_kernels_interpreted``."""

from pathlib import Path

from tests.interpreting import assert_passes_interpreted, needs_triton


@needs_triton
def test_the_kernels_pass_their_tests_in_tritons_interpreter():
    assert_passes_interpreted(Path(__file__).parent / "bert_kernels_interpreted.py")
