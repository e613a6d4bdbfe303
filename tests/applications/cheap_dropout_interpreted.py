"""The very kernel, run by Triton's interpreter on the host. `test_cheap_dropout` starts pytest on this file."""

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
    input, shortcut = (torch.randn(shape, dtype=dtype) for _ in range(2))
    words = draw_words(input)
    plain = thinned(input.float(), words, dropout)
    torch.testing.assert_close(thinned_by_kernel(input, None, words, dropout), plain.to(dtype))
    torch.testing.assert_close(thinned_by_kernel(input, shortcut, words, dropout), (plain + shortcut).to(dtype))


def test_inputs_need_not_be_contiguous():
    torch.manual_seed(0)
    input, shortcut = (torch.randn(60, 20).t() for _ in range(2))
    words = draw_words(input)
    ours = thinned_by_kernel(input, shortcut, words, 0.3)
    torch.testing.assert_close(ours, thinned(input, words, 0.3) + shortcut)


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("frozen", ["input", "shortcut", None])
def test_gradients_have_the_same_zeros_and_reach_the_shortcut(frozen):
    torch.manual_seed(0)
    input, shortcut = (torch.randn(6, 5, 8, requires_grad=name != frozen) for name in ("input", "shortcut"))
    summed = CheapDropout(0.4).added_to(shortcut, input)
    gradient = torch.randn_like(summed)
    summed.backward(gradient)
    dropped = (summed - shortcut).detach() == 0
    if frozen != "input":
        assert torch.equal(input.grad == 0, dropped)
        torch.testing.assert_close(input.grad, torch.where(dropped, 0.0, gradient / 0.6))
    if frozen != "shortcut":
        assert torch.equal(shortcut.grad, gradient)


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
    assert torch.equal(layer.added_to(input, input), input + input)


@pytest.mark.usefixtures("on_the_host")
def test_a_shortcut_of_another_shape_or_dtype_is_added_as_torch_does_it():
    layer, input = CheapDropout(0.5), torch.ones(3, 4)
    assert layer.added_to(torch.zeros(4), input).shape == (3, 4)
    assert layer.added_to(torch.zeros(3, 4, dtype=torch.float64), input).dtype == torch.float64
