"""Small tools over lists of tensors."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fleetx.optim import Lars
from fleetx.optim.foreach import ROW, norms

LONG = (64, 32, 40, 50)  # 4 million elements


@pytest.mark.parametrize(
    "arranged",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.to(memory_format=torch.channels_last),
        lambda tensor: tensor.transpose(0, 3),
        lambda tensor: tensor[:, :, :, ::2],
        lambda tensor: tensor.flatten()[:-1],  # no whole number of rows
    ],
)
def test_norms_of_long_tensors_are_as_exact_as_those_of_short_ones(arranged):
    tensor = arranged(torch.randn(LONG, generator=torch.Generator().manual_seed(0)))
    short = torch.linspace(-1, 1, 9)
    found = norms([short, tensor, torch.empty(0)])
    assert found.dtype == torch.float32
    expected = [short.double().norm().item(), tensor.double().norm().item(), 0.0]
    assert found.tolist() == pytest.approx(expected, rel=2e-7, abs=0)


class Copies(TorchDispatchMode):
    """Remembers how many elements were copied."""

    copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.copied += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_long_tensors_are_not_copied(memory_format):
    tensor = torch.ones(2, 3, 100, 100).to(memory_format=memory_format)
    with Copies() as copies:
        norms([tensor])
    assert copies.copied <= tensor.numel() // ROW + 1


@pytest.mark.parametrize("dynamic", [True, False])
def test_norms_can_be_compiled(dynamic):
    tensors = [torch.ones(3), torch.ones(2, 3, 100, 100).to(memory_format=torch.channels_last)]
    compiled = torch.compile(norms, backend="eager", fullgraph=True, dynamic=dynamic)
    assert compiled(tensors).tolist() == pytest.approx([3**0.5, 60_000**0.5])


@pytest.mark.parametrize("size", [3, ROW + 3])
@pytest.mark.parametrize("magnitude", [1e-25, 1e25])
def test_norms_of_numbers_whose_squares_fp32_cannot_hold(size, magnitude):
    found = norms([torch.full((size,), magnitude), torch.zeros(2), torch.ones(size)])
    assert found.tolist() == pytest.approx([magnitude * size**0.5, 0.0, size**0.5], rel=1e-6, abs=0)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_of_what_is_not_finite_stay_so(bad):
    (found,) = norms([torch.tensor([1.0, bad])]).tolist()
    assert not math.isfinite(found)


@pytest.mark.parametrize(("weight", "gradient"), [(1.0, 1e25), (1e-25, 1.0)])
def test_lars_moves_weights_by_a_share_of_themselves_at_any_magnitude(weight, gradient):
    parameter = torch.nn.Parameter(torch.full((4,), weight))
    parameter.grad = torch.full((4,), gradient)
    Lars([parameter], lr=1.0, lars_coeff=0.5, lars_weight_decay=0.0).step()
    torch.testing.assert_close(parameter.detach(), torch.full((4,), weight / 2), rtol=1e-6, atol=0)
