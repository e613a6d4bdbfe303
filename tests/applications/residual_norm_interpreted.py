"""The very kernels, run by Triton's interpreter on the host. `test_kernels` starts pytest on this file."""

import pytest
import torch
from torch import nn

from fleetx.applications import column_sums, residual_norm
from fleetx.applications.cheap_dropout import draw_words, thinned
from tests.interpreting import scalars_count  # noqa: F401 - a fixture of all tests here

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, about products of words that do not fit
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """So that each has several rows, and sums several shares: the interpreter is slow."""
    monkeypatch.setattr(residual_norm, "_PROGRAMS", 5)
    monkeypatch.setattr(column_sums, "_ROWS", 4)


def made(shape, dtype=torch.float32):
    """A projection, its bias, a shortcut, a norm, and a gradient."""
    torch.manual_seed(len(shape))
    norm = nn.LayerNorm(shape[-1])
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    projected, shortcut, gradient = (torch.randn(shape).to(dtype) for _ in range(3))
    return (
        projected.requires_grad_(),
        torch.randn(shape[-1]).requires_grad_(),
        shortcut.requires_grad_(),
        norm,
        gradient,
    )


def exactly(projected, bias, shortcut, norm, words, dropout):
    value = projected.double() + bias.double()
    value = value if words is None else thinned(value, words, dropout)
    parameters = norm.weight.double(), norm.bias.double()
    return nn.functional.layer_norm(value + shortcut.double(), norm.normalized_shape, *parameters, norm.eps)


def both(shape, dropout, dtype=torch.float32):
    """Outputs and all gradients: ours, and those of the formula in fp64."""
    projected, bias, shortcut, norm, gradient = made(shape, dtype)
    inputs = projected, bias, shortcut, norm.weight, norm.bias
    torch.manual_seed(7)
    words = draw_words(shortcut) if dropout else None
    torch.manual_seed(7)
    output = residual_norm.residual_norm(projected, bias, shortcut, norm, dropout)
    ours = output, *torch.autograd.grad(output, inputs, gradient)
    exact = exactly(projected, bias, shortcut, norm, words, dropout)
    return ours, (exact, *torch.autograd.grad(exact, inputs, gradient.double()))


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (7, 40), (3, 4, 100), (2, 1024), (9, 1025)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_kernels_do_what_the_formula_says(shape, dropout):
    for ours, exact in zip(*both(shape, dropout), strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-5, atol=2e-5)


def test_low_precision_is_rounded_and_sums_of_parameters_are_not():
    ours, exact = both((40, 48), 0.25, torch.float16)
    assert [one.dtype for one in ours] == [torch.float16, torch.float16, torch.float32, torch.float16] + [
        torch.float32
    ] * 2
    for one, other in zip(ours, exact, strict=True):
        assert (one.double() - other.double()).norm() < 4 * torch.finfo(torch.float16).eps * other.double().norm()


def test_inputs_need_not_be_contiguous():
    projected, bias, shortcut, norm, gradient = made((30, 20))
    output = residual_norm.residual_norm(projected, bias, shortcut, norm, 0.0)
    turned = projected.detach().t().contiguous().t(), shortcut.detach().t().contiguous().t()
    again = residual_norm.residual_norm(turned[0], bias, turned[1], norm, 0.0)
    assert torch.equal(output, again)
    straight = torch.autograd.grad(output, bias, gradient)[0]
    assert torch.equal(straight, torch.autograd.grad(again, bias, gradient.t().contiguous().t())[0])


@pytest.mark.parametrize("frozen", [0, 1, 2, 3, 4])
def test_what_is_frozen_has_no_gradient(frozen):
    projected, bias, shortcut, norm, gradient = made((6, 8))
    inputs = [projected, bias, shortcut, norm.weight, norm.bias]
    inputs[frozen].requires_grad_(False)
    residual_norm.residual_norm(projected, bias, shortcut, norm, 0.0).backward(gradient)
    assert [one.grad is None for one in inputs] == [number == frozen for number in range(5)]


def test_it_repeats_with_the_generator_and_draws_nothing_without_zeros():
    projected, bias, shortcut, norm, _ = made((20, 30))
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        seen.append([residual_norm.residual_norm(projected, bias, shortcut, norm, 0.3) for _ in range(2)])
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
    assert not torch.equal(*seen[0])
    before = torch.get_rng_state()
    residual_norm.residual_norm(projected, bias, shortcut, norm, 0.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_many_gradients_at_once(dropout):
    projected, bias, shortcut, norm, _ = made((6, 8))
    inputs = projected, bias, shortcut, norm.weight, norm.bias
    output = residual_norm.residual_norm(projected, bias, shortcut, norm, dropout)
    gradients = torch.randn(3, *output.shape)
    together = torch.autograd.grad(output, inputs, gradients, is_grads_batched=True, retain_graph=True)
    for number, gradient in enumerate(gradients):
        alone = torch.autograd.grad(output, inputs, gradient, retain_graph=True)
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one[number], other)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_derivatives_of_derivatives(dropout):
    projected, bias, shortcut, norm, gradient = made((6, 8), torch.float32)
    inputs = projected, bias, shortcut, norm.weight, norm.bias
    torch.manual_seed(7)
    words = draw_words(shortcut) if dropout else None
    torch.manual_seed(7)
    ours = residual_norm.residual_norm(projected, bias, shortcut, norm, dropout)
    exact = exactly(projected, bias, shortcut, norm, words, dropout)
    second = []
    for output in (ours, exact):
        first = torch.autograd.grad(output, inputs, gradient.to(output.dtype), create_graph=True)
        of_squares = sum(one.double().square().sum() for one in first)
        second.append(torch.autograd.grad(of_squares + output.double().sum(), inputs))
    for one, other in zip(*second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
