"""Which norm runs where; the kernel's own tests are in ``stream_norm_interpreted``."""

from pathlib import Path

import pytest
import torch

from fleetx.applications.stream_norm import StreamLayerNorm
from tests.interpreting import assert_passes_interpreted, needs_triton

HERE = Path(__file__).parent


@needs_triton
def test_the_kernel_passes_its_tests_in_tritons_interpreter():
    assert_passes_interpreted(HERE / "stream_norm_interpreted.py")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_on_the_host_it_is_torchs_norm_in_the_dtype_of_the_input(dtype):
    norm, input = StreamLayerNorm(8), torch.randn(2000, 8, dtype=dtype)
    low = [one.to(dtype) for one in (norm.weight, norm.bias)]
    assert torch.equal(norm(input), torch.nn.functional.layer_norm(input, (8,), *low))


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}])
def test_it_may_lack_parameters(options):
    input = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(StreamLayerNorm(8, **options)(input), torch.nn.functional.layer_norm(input, (8,)))
