"""Which residual streams are taken; the kernels' own tests are in ``residual_norm_interpreted``."""

from pathlib import Path

import pytest
import torch

from fleetx.applications import own_kernels, residual_norm
from tests.interpreting import assert_passes_interpreted, needs_triton


@needs_triton
def test_the_kernels_pass_their_tests_in_tritons_interpreter():
    assert_passes_interpreted(Path(__file__).parent / "residual_norm_interpreted.py")


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    [((1024, 8), True), ((2, 512, 8), True), ((1023, 8), False), ((1024, 4096), True), ((1024, 4097), False)],
)
def test_streams_of_few_rows_or_too_many_columns_are_left_to_torch(shape, is_taken, monkeypatch):
    stream = torch.empty(shape, dtype=torch.bfloat16)
    assert not residual_norm.can_take(stream)  # which is not on a GPU
    monkeypatch.setattr(own_kernels, "can_take", lambda _: True)
    assert residual_norm.can_take(stream) == is_taken
