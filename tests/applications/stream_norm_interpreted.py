"""The very kernel, run by Triton's interpreter on the host. `test_stream_norm` starts pytest on this file."""

import pytest
import torch

from fleetx.applications import stream_norm
from tests.interpreting import scalars_count  # noqa: F401 - a fixture of all tests here

pytestmark = pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning")


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (5, 3), (16, 128), (17, 129), (100, 200), (1024, 64), (2000, 130)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_over_rows_are_those_of_the_formula(rows, columns, dtype, monkeypatch):
    monkeypatch.setattr(stream_norm, "_PROGRAMS", 8)  # the interpreter is slow
    torch.manual_seed(rows)
    gradient, input = (torch.randn(rows, columns, dtype=dtype) for _ in range(2))
    _, mean, deviation = torch.native_layer_norm(input.float(), (columns,), None, None, 1e-5)
    weight, bias = stream_norm.parameter_gradients(gradient, input, mean, deviation)
    exact = (input.double() - mean.double()) * deviation.double() * gradient.double()
    torch.testing.assert_close(weight.double(), exact.sum(0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(bias.double(), gradient.double().sum(0), rtol=1e-5, atol=1e-4)


def test_inputs_need_not_be_contiguous():
    torch.manual_seed(0)
    gradient, input = (torch.randn(40, 300).t() for _ in range(2))
    _, mean, deviation = torch.native_layer_norm(input, (40,), None, None, 1e-5)
    ours = stream_norm.parameter_gradients(gradient, input, mean, deviation)
    again = stream_norm.parameter_gradients(gradient.contiguous(), input.contiguous(), mean, deviation)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def through(norm, shape, dtype=torch.float16):
    torch.manual_seed(1)
    input, gradient = (torch.randn(shape).half().to(dtype) for _ in range(2))
    output = norm(input.requires_grad_())
    output.backward(gradient)
    return output, input.grad, norm.weight.grad, norm.bias.grad


def normed(monkeypatch, *, ours):
    torch.manual_seed(2)
    norm = stream_norm.StreamLayerNorm(48)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    monkeypatch.setattr(stream_norm.StreamLayerNorm, "_has_own_backward", lambda _self, _input: ours)
    return norm


def test_the_norm_is_torchs_but_for_more_precise_gradients_of_its_parameters(monkeypatch):
    ours = through(normed(monkeypatch, ours=True), (30, 20, 48))
    plain = through(normed(monkeypatch, ours=False), (30, 20, 48))
    assert torch.equal(ours[0], plain[0])
    torch.testing.assert_close(ours[1], plain[1], rtol=2e-3, atol=2e-3)
    exact = through(normed(monkeypatch, ours=False).double(), (30, 20, 48), torch.float64)
    for number in (2, 3):
        assert ours[number].dtype == torch.float32
        torch.testing.assert_close(ours[number].double(), exact[number], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("frozen", [["weight"], ["bias"], ["weight", "bias"]])
def test_frozen_parameters_have_no_gradients(frozen, monkeypatch):
    norm = normed(monkeypatch, ours=True)
    for name in frozen:
        getattr(norm, name).requires_grad_(False)
    _, gradient, weight, bias = through(norm, (30, 48))
    assert gradient is not None
    assert (weight is None) == ("weight" in frozen)
    assert (bias is None) == ("bias" in frozen)


def test_derivatives_of_derivatives_are_torchs(monkeypatch):
    def second(ours):
        norm = normed(monkeypatch, ours=ours)
        torch.manual_seed(3)
        input = torch.randn(6, 48, requires_grad=True)
        (first,) = torch.autograd.grad(norm(input).float().pow(3).sum(), input, create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), [input, norm.weight])

    for ours, plain in zip(second(True), second(False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5 * plain.abs().max().item())


def test_many_gradients_at_once(monkeypatch):
    norm = normed(monkeypatch, ours=True)
    output = norm(torch.randn(3, 48))
    gradients = torch.randn(4, *output.shape)
    (together,) = torch.autograd.grad(output, norm.weight, gradients, is_grads_batched=True, retain_graph=True)
    for one, gradient in zip(together, gradients, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(output, norm.weight, gradient, retain_graph=True)[0])
