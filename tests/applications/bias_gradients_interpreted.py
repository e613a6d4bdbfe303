"""The very kernels, run by Triton's interpreter on the host. `test_kernels` starts pytest on this file."""

import pytest
import torch
from torch.nn import functional

from fleetx.applications import bias_gradients, column_sums
from tests.interpreting import scalars_count  # noqa: F401 - a fixture of all tests here

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, about infinity times zero
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]
SHAPES = [(1, 1), (5, 3), (7, 40), (3, 4, 100), (2, 1024), (9, 1025)]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """So that each has several rows, and sums several shares: the interpreter is slow."""
    monkeypatch.setattr(bias_gradients, "_GELU_PROGRAMS", 12)
    monkeypatch.setattr(bias_gradients, "_PARTS_PROGRAMS", 12)
    monkeypatch.setattr(column_sums, "_ROWS", 4)


def made(shape):
    torch.manual_seed(len(shape))
    return torch.randn(shape, requires_grad=True), torch.randn(shape[-1:], requires_grad=True), torch.randn(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_is_that_of_the_sum(shape):
    projected, bias, gradient = made(shape)
    output = bias_gradients.biased_gelu(projected, bias)
    exact = functional.gelu(projected.double() + bias.double())
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=2e-6)
    ours = torch.autograd.grad(output, (projected, bias), gradient)
    theirs = torch.autograd.grad(exact, (projected, bias), gradient.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gelu_is_right_everywhere():
    values = torch.linspace(-12, 12, 4001).view(1, -1).requires_grad_()
    output = bias_gradients.biased_gelu(values, torch.zeros(4001))
    exact = functional.gelu(values.double())
    assert (output - exact).abs().max() < 1e-6
    slopes = torch.autograd.grad(output.sum(), values)[0], torch.autograd.grad(exact.sum(), values)[0]
    assert (slopes[0] - slopes[1]).abs().max() < 1e-6


def test_what_is_not_a_number_stays_so():
    values = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1e30, -1e30]], requires_grad=True)
    output = bias_gradients.biased_gelu(values, torch.zeros(5))
    torch.testing.assert_close(output.double(), functional.gelu(values.double()), equal_nan=True)
    output[0, 0].backward()
    assert values.grad[0, 0].isnan()


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_views_and_their_gradients_lie_side_by_side(shape):
    torch.manual_seed(0)
    projected = torch.randn(*shape[:-1], 3 * shape[-1], requires_grad=True)
    bias = torch.randn(3 * shape[-1], requires_grad=True)
    parts = bias_gradients.parts_with_bias(projected, bias)
    assert all(torch.equal(part, chunk) for part, chunk in zip(parts, projected.chunk(3, -1), strict=True))
    assert {part.untyped_storage().data_ptr() for part in parts} == {projected.untyped_storage().data_ptr()}
    gradients = [torch.randn(shape) for _ in range(3)]
    ours = torch.autograd.grad(parts, (projected, bias), gradients)
    joined = torch.cat(gradients, -1)
    assert torch.equal(ours[0], joined)
    torch.testing.assert_close(ours[1], joined.flatten(0, -2).sum(0), rtol=1e-5, atol=1e-5)


def test_parts_that_nobody_used_have_no_gradient():
    projected, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    query, _, _ = bias_gradients.parts_with_bias(projected, bias)
    query.sum().backward()
    assert projected.grad.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * 4
    assert bias.grad.tolist() == [4.0, 4.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("frozen", ["projected", "bias"])
@pytest.mark.parametrize("function", [bias_gradients.biased_gelu, bias_gradients.parts_with_bias])
def test_what_is_frozen_has_no_gradient(function, frozen):
    inputs = {
        name: torch.randn(shape, requires_grad=name != frozen)
        for name, shape in (("projected", (5, 6)), ("bias", (6,)))
    }
    output = function(**inputs)
    (output if isinstance(output, torch.Tensor) else output[0] + output[2]).sum().backward()
    assert {name for name, one in inputs.items() if one.grad is None} == {frozen}


def test_derivatives_of_derivatives_and_many_gradients_at_once():
    projected, bias, gradient = made((6, 8))
    second = []
    for function in (bias_gradients.biased_gelu, lambda x, b: functional.gelu(x + b)):
        first = torch.autograd.grad(function(projected, bias), (projected, bias), gradient, create_graph=True)
        second.append(torch.autograd.grad(sum(one.square().sum() for one in first), (projected, bias)))
    for ours, theirs in zip(*second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    turned = projected.detach().t().contiguous().requires_grad_()
    first = torch.autograd.grad(bias_gradients.biased_gelu(turned.t(), bias).sum(), turned, create_graph=True)
    assert torch.autograd.grad(first[0].square().sum(), turned)[0].norm() > 0.1


@pytest.mark.parametrize("part", [0, 1, 2, None])
def test_many_gradients_at_once(part):
    """Of GELU, and of each part by itself: those of the others are zeros then, of one gradient only."""
    projected, bias = torch.randn(6, 9, requires_grad=True), torch.randn(9, requires_grad=True)
    if part is None:
        output = bias_gradients.biased_gelu(projected, bias)
    else:
        output = bias_gradients.parts_with_bias(projected, bias)[part]
    gradients = torch.randn(3, *output.shape)
    (together,) = torch.autograd.grad(output, bias, gradients, is_grads_batched=True, retain_graph=True)
    for one, each in zip(together, gradients, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(output, bias, each, retain_graph=True)[0])
