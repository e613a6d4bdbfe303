"""Which residual streams are taken; the kernels' own tests are in ``residual_norm_interpreted``."""

import pytest
import torch

from fleetx.applications import own_kernels, residual_norm


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    [((1024, 8), True), ((2, 512, 8), True), ((1023, 8), False), ((1024, 4096), True), ((1024, 4097), False)],
)
def test_streams_of_few_rows_or_too_many_columns_are_left_to_torch(shape, is_taken, monkeypatch):
    stream = torch.empty(shape, dtype=torch.bfloat16)
    assert not residual_norm.can_take(stream)  # which is not on a GPU
    monkeypatch.setattr(own_kernels, "can_take", lambda _: True)
    assert residual_norm.can_take(stream) == is_taken
