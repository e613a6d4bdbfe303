"""A BERT whose kernels Triton's interpreter runs on the host. `test_kernels` starts pytest on this file."""

import pytest
import torch
from torch import nn

import fleetx.memory
from fleetx.applications import bias_gradients, column_sums, own_kernels, residual_norm
from fleetx.applications.bert_layers import BertResidual
from fleetx.memory import Segment
from fleetx.notices import _told
from fleetx.planner.blocks import find_blocks
from fleetx.planner.feeding import Feeding
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


def with_bias_beside(layer):
    del layer.dense.bias
    layer.dense.bias = None


def with_every_second(layer, part, name):
    """Parameters that are views of something larger."""
    parameter = getattr(getattr(layer, part), name)
    setattr(getattr(layer, part), name, nn.Parameter(torch.randn(2 * len(parameter))[::2]))


CHANGES = {
    "hook on dense": lambda layer: hooked(layer, "dense"),
    "hook on dropout": lambda layer: hooked(layer, "dropout"),
    "hook on norm": lambda layer: hooked(layer, "LayerNorm"),
    "other dense": replaced,
    "other forward": with_other_forward,
    "no bias": lambda layer: layer.dense.register_parameter("bias", None),
    "a bias that is no parameter": with_bias_beside,
    "a shorter bias": lambda layer: setattr(layer.dense, "bias", nn.Parameter(torch.randn(1))),
    "strided bias": lambda layer: with_every_second(layer, "dense", "bias"),
    "strided norm": lambda layer: with_every_second(layer, "LayerNorm", "weight"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_were_changed_are_called(on_the_host, change):
    layer, hidden, shortcut = residual()
    before = layer(hidden, shortcut)
    CHANGES[change](layer)
    after = layer(hidden, shortcut)
    assert on_the_host == ["residual_norm"]
    if "bias" not in change:  # which is zero
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


def test_hidden_states_of_other_shapes_are_broadcast_or_refused_as_by_torch(on_the_host):
    layer, hidden, shortcut = residual()
    torch.testing.assert_close(layer(hidden[:1], shortcut), layer(hidden[:1].expand(4, 6), shortcut))
    layer.dense = nn.Linear(6, 8)
    with pytest.raises(RuntimeError, match="size"):
        layer(hidden, shortcut)
    assert on_the_host == ["residual_norm"]


PARTS = ["attention.self.query", "attention.output.dense", "intermediate.dense", "output.LayerNorm"]


@pytest.mark.parametrize("watched", PARTS)
def test_parts_that_are_watched_are_called_and_that_is_said_once(on_the_host, watched, caplog):
    _told.clear()
    model, inputs = plain.tiny(), plain.batch(n=3)
    expected, gradients = losses_and_gradients(model, inputs)
    assert not caplog.text
    usual = on_the_host.copy()
    called = []
    for layer in model.bert.encoder.layer:
        layer.get_submodule(watched).register_forward_hook(lambda *_: called.append(1))
    losses, again = losses_and_gradients(model, inputs)
    assert len(called) == 2
    stood_in = {"query": "parts_with_bias", "intermediate": "biased_gelu"}
    missing = next((kernel for part, kernel in stood_in.items() if part in watched), "residual_norm")
    ran = on_the_host[len(usual) :]
    assert [usual.count(name) - ran.count(name) for name in dict.fromkeys([missing, *usual])] == [2, 0, 0]
    assert caplog.text.count("are not as they were made") == 1
    for one, other in ((losses, expected), (again, gradients)):
        for name in other:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5, msg=name)


def test_what_the_planner_looks_at_is_not_told(on_the_host, caplog):
    _told.clear()
    model = plain.tiny()
    assert find_blocks(Feeding(model), plain.batch(n=3)) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert not caplog.text
    assert not _told


HALVES = ("bert.encoder.layer.*.attention", "bert.encoder.layer.*.output")


@pytest.mark.parametrize(
    "plan",
    [["bert.encoder.layer.*"], [*HALVES], [Segment(name, "dear") for name in HALVES]],
    ids=["layers", "halves", "dear"],
)
def test_what_is_computed_again_has_the_same_bits(on_the_host, plan):
    model, inputs = plain.tiny(dropout=0.3), plain.batch(n=2)

    def trained():
        torch.manual_seed(5)
        losses, gradients = losses_and_gradients(model, inputs)
        return [*losses.values(), *gradients.values()]

    expected = trained()
    ran = len(on_the_host)
    with fleetx.memory.apply(model, plan):
        ours = trained()
    assert len(on_the_host) > 2 * ran
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_may_be_of_low_precision(on_the_host, monkeypatch, dtype):
    """Those of fp32 say how near is near."""
    model, inputs = plain.tiny(), plain.batch(n=3)
    exact = losses_and_gradients(model, inputs)
    model.to(dtype)
    ours = losses_and_gradients(model, inputs)
    assert {gradient.dtype for gradient in ours[1].values()} == {dtype}
    monkeypatch.setattr(own_kernels, "can_take", lambda _: False)
    torchs = losses_and_gradients(model, inputs)
    for one, other, expected in zip(ours, torchs, exact, strict=True):
        for name in expected:
            off, torchs_off = ((found[name] - expected[name]).norm() for found in (one, other))
            assert off < 2 * torchs_off + 0.02 * expected[name].norm() + 1e-4, name


def test_another_dtype_is_left_to_torch(on_the_host):
    layer, hidden, shortcut = residual()
    assert layer(hidden, shortcut.double()).dtype == torch.float64
    assert on_the_host == []
