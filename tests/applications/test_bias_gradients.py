"""Which hidden states are taken; the kernels' own tests are in ``bias_gradients_interpreted``."""

import pytest
import torch

from fleetx.applications import bias_gradients, own_kernels


@pytest.mark.parametrize(("shape", "is_taken"), [((16384, 2), True), ((32, 512, 2), True), ((16383, 2), False)])
def test_where_the_host_is_the_limit_torchs_operations_are_taken(shape, is_taken, monkeypatch):
    hidden = torch.empty(shape, dtype=torch.bfloat16)
    assert not bias_gradients.can_take(hidden)  # which is not on a GPU
    monkeypatch.setattr(own_kernels, "can_take", lambda _: True)
    assert bias_gradients.can_take(hidden) == is_taken
