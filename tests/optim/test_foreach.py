"""Small tools over lists of tensors."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
