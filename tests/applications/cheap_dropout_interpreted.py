"""The very kernel, run by Triton's interpreter on the host. `test_kernels` starts pytest on this file."""

import pytest
import torch

from fleetx.applications import cheap_dropout, own_kernels
from fleetx.applications.cheap_dropout import CheapDropout, draw_words, thinned, thinned_by_kernel
from tests.interpreting import scalars_count  # noqa: F401 - a fixture of all tests here

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, about products of words that do not fit
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]
SHAPES = [(1, 1), (5, 3), (4, 1024), (3, 1025), (7, 100), (2, 3, 40), (9,), (0, 4), (4, 0)]


@pytest.fixture
def on_the_host(monkeypatch):
    monkeypatch.setattr(own_kernels, "can_take", lambda _: True)
    monkeypatch.setattr(cheap_dropout, "_FEWEST_ROWS", 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dropout", [0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernel_does_what_torchs_operations_do(shape, dropout, dtype):
    torch.manual_seed(len(shape))
    input = torch.randn(shape, dtype=dtype)
    words = draw_words(input)
    plain = thinned(input.float(), words, dropout)
    torch.testing.assert_close(thinned_by_kernel(input, words, dropout), plain.to(dtype))


def test_inputs_need_not_be_contiguous():
    torch.manual_seed(0)
    input = torch.randn(60, 20).t()
    words = draw_words(input)
    torch.testing.assert_close(thinned_by_kernel(input, words, 0.3), thinned(input, words, 0.3))


@pytest.mark.usefixtures("on_the_host")
def test_gradients_have_the_same_zeros():
    torch.manual_seed(0)
    input = torch.randn(6, 5, 8, requires_grad=True)
    output = CheapDropout(0.4)(input)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    assert torch.equal(input.grad == 0, output == 0)
    torch.testing.assert_close(input.grad, torch.where(output == 0, 0.0, gradient / 0.6))


@pytest.mark.usefixtures("on_the_host")
def test_it_repeats_with_the_generator():
    layer, input = CheapDropout(0.3), torch.randn(20, 30)
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        seen.append([layer(input), layer(input)])
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
    assert not torch.equal(*seen[0])


@pytest.mark.usefixtures("on_the_host")
def test_derivatives_of_derivatives_and_many_gradients_at_once():
    torch.manual_seed(0)
    input = torch.randn(6, 8, requires_grad=True)
    output = CheapDropout(0.5)(input)
    (first,) = torch.autograd.grad(output.pow(3).sum(), input, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), input)
    torch.testing.assert_close(second, 6 * output.detach() * 4)  # each derivative brings a factor of two
    gradients = torch.randn(4, 6, 8)
    (together,) = torch.autograd.grad(CheapDropout(0.5)(input), input, gradients, is_grads_batched=True)
    assert torch.equal(together[0] == 0, together[3] == 0)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("change", [lambda one: one.eval(), lambda one: setattr(one, "p", 0.0)])
def test_without_zeros_nothing_is_drawn(change, monkeypatch):
    layer, input = CheapDropout(0.5), torch.randn(3, 4)
    change(layer)
    monkeypatch.setattr(cheap_dropout, "draw_words", None)
    assert torch.equal(layer(input), input)
