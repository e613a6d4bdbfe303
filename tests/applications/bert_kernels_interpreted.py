"""A BERT whose kernels Triton's interpreter runs on the host. `test_bert_kernels` starts pytest on this file."""

import pytest
import torch
from torch import nn

from fleetx.applications import bias_gradients, column_sums, own_kernels, residual_norm
from fleetx.applications.bert_layers import BertResidual
from tests.applications import bert_plain as plain
from tests.interpreting import scalars_count  # noqa: F401 - a fixture of all tests here

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, about products of words that do not fit
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture
def on_the_host(monkeypatch):
    """Kernels run in fp32 too, and on few rows; what ran is noted."""
    monkeypatch.setattr(own_kernels, "can_take", lambda _: True)
    ran = []
    for module in (residual_norm, bias_gradients):
        monkeypatch.setattr(module, "_FEWEST_ROWS", 1)
    for module, programs in (
        (residual_norm, "_PROGRAMS"),
        (bias_gradients, "_GELU_PROGRAMS"),
        (bias_gradients, "_PARTS_PROGRAMS"),
    ):
        monkeypatch.setattr(module, programs, 12)
    monkeypatch.setattr(column_sums, "_ROWS", 8)
    for module, name in (
        (residual_norm, "residual_norm"),
        (bias_gradients, "biased_gelu"),
        (bias_gradients, "parts_with_bias"),
    ):
        monkeypatch.setattr(module, name, _noting(ran, name, getattr(module, name)))
    return ran


def _noting(ran, name, function):
    return lambda *args: (ran.append(name), function(*args))[1]


def losses_and_gradients(model, inputs):
    model.zero_grad()
    losses = model(**inputs)
    sum(losses.values()).backward()
    return {name: loss.detach() for name, loss in losses.items()}, {n: p.grad for n, p in model.named_parameters()}


def test_a_model_trains_as_by_torchs_operations(on_the_host, monkeypatch):
    model, inputs = plain.tiny(), plain.batch(n=3)
    ours = losses_and_gradients(model, inputs)
    assert on_the_host == ["parts_with_bias", "residual_norm", "biased_gelu", "residual_norm"] * 2
    monkeypatch.setattr(own_kernels, "can_take", lambda _: False)
    theirs = losses_and_gradients(model.double(), inputs)
    assert len(on_the_host) == 8
    for one, other in zip(ours, theirs, strict=True):
        for name in other:
            torch.testing.assert_close(one[name].double(), other[name].double(), rtol=1e-4, atol=1e-5, msg=name)


def residual(dropout=0.0):
    torch.manual_seed(0)
    return BertResidual(6, plain.tiny(dropout=dropout).config), torch.randn(4, 6), torch.randn(4, 16)


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def hooked(layer, part):
    getattr(layer, part).register_forward_hook(lambda _module, _args, output: 2 * output)


def replaced(layer):
    other = Doubled(6, 16)
    other.load_state_dict(layer.dense.state_dict())
    layer.dense = other


def with_other_forward(layer):
    forward = layer.dense.forward
    layer.dense.forward = lambda input: 2 * forward(input)


CHANGES = {
    "hook on dense": lambda layer: hooked(layer, "dense"),
    "hook on dropout": lambda layer: hooked(layer, "dropout"),
    "hook on norm": lambda layer: hooked(layer, "LayerNorm"),
    "other dense": replaced,
    "other forward": with_other_forward,
    "no bias": lambda layer: layer.dense.register_parameter("bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_were_changed_are_called(on_the_host, change):
    layer, hidden, shortcut = residual()
    before = layer(hidden, shortcut)
    CHANGES[change](layer)
    after = layer(hidden, shortcut)
    assert on_the_host == ["residual_norm"]
    if change != "no bias":  # which is zero
        assert not torch.allclose(before, after, atol=1e-3)
    expected = layer.LayerNorm(layer.dropout(layer.dense(hidden)) + shortcut)
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_dropout_is_that_of_training(on_the_host, rate):
    layer, hidden, shortcut = residual(0.5)
    layer.dropout.p = rate
    evaluated = layer.eval()(hidden, shortcut)
    torch.testing.assert_close(evaluated, layer.LayerNorm(layer.dense(hidden) + shortcut))
    trained = layer.train()(hidden, shortcut)
    assert torch.allclose(trained, evaluated, atol=1e-6) == (rate == 0.0)
    assert len(on_the_host) == 1 + (rate < 1.0)


def test_another_dtype_is_left_to_torch(on_the_host):
    layer, hidden, shortcut = residual()
    assert layer(hidden, shortcut.double()).dtype == torch.float64
    assert on_the_host == []
