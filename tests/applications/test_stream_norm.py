"""The norm of the residual stream keeps its dtype."""

import pytest
import torch

from fleetx.applications.stream_norm import StreamLayerNorm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_on_the_host_it_is_torchs_norm_in_the_dtype_of_the_input(dtype):
    norm, input = StreamLayerNorm(8), torch.randn(2000, 8, dtype=dtype)
    low = [one.to(dtype) for one in (norm.weight, norm.bias)]
    assert torch.equal(norm(input), torch.nn.functional.layer_norm(input, (8,), *low))


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}])
def test_it_may_lack_parameters(options):
    input = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(StreamLayerNorm(8, **options)(input), torch.nn.functional.layer_norm(input, (8,)))
