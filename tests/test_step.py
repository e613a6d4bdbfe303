"""`Step` on one worker: how a batch becomes a loss, and what is reported."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fleetx as X
from fleetx import batch_step, fleet, gradient_marks, gradients
from fleetx.nonfinite import NonFiniteWatch
from fleetx.update import Updater
from fleetx.window import Window
from tests import plain


def merging(k_steps=4, **configs):
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps, **configs})


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(n=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator, dtype=torch.float64), torch.randint(0, 3, (n,), generator=generator)


def assert_trained_like(net, compute_loss, n_updates=1):
    reference = plain.make_net()
    optimizer = sgd(reference)
    for _ in range(n_updates):
        reference.zero_grad()
        compute_loss(reference).backward()
        optimizer.step()
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_it_prepares_model_and_optimizer_by_itself_and_reports():
    net = plain.make_net()
    step = X.Step(net, sgd(net), functional.cross_entropy, merging(), clip_norm=1e9)
    out = step(batch())
    assert (out.updated, out.skipped, out.samples, out.lr, out.loss_scale) == (True, False, 16, 0.1, 1.0)
    assert out.samples_per_s > 0
    assert out.comm_hidden is None  # a worker alone
    assert out.loss.item() == pytest.approx(plain.mean_loss(plain.make_net(), batch()).item(), rel=1e-12)
    reference = plain.make_net()
    plain.mean_loss(reference, batch()).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    assert out.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
    assert_trained_like(net, lambda model: plain.mean_loss(model, batch()))


def test_one_micro_batch_is_bit_equal_to_torch():
    net = plain.make_net()
    step = X.Step(net, sgd(net), functional.cross_entropy)
    step(batch())
    reference = plain.make_net()
    optimizer = sgd(reference)
    plain.mean_loss(reference, batch()).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), reference.parameters(), strict=True))


class Inputs(NamedTuple):
    x: torch.Tensor
    scale: float


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = plain.make_net()

    def forward(self, x, scale=1.0):
        return self.net(x) * scale


@pytest.mark.parametrize("pack", [lambda x: Inputs(x, 2.0), lambda x: [x, 2.0], lambda x: {"x": x, "scale": 2.0}])
def test_inputs_are_spread_over_the_models_arguments(pack):
    model = TwoInputs()
    step = X.Step(model, sgd(model), functional.cross_entropy, merging())
    x, y = batch()
    step((pack(x), y))
    assert_trained_like(model.net, lambda net: functional.cross_entropy(net(x) * 2, y))


class OwnLoss(nn.Module):
    """Like models of other libraries: labels in, something with `.loss` out."""

    class Output(NamedTuple):
        loss: torch.Tensor
        scores: torch.Tensor

    def __init__(self, kind):
        super().__init__()
        self.net = plain.make_net()
        self.kind = kind

    def forward(self, x, labels):
        scores = self.net(x)
        loss = functional.cross_entropy(scores, labels)
        return {"tensor": loss, "dict": {"a": loss / 2, "b": loss / 2}, "object": self.Output(loss, scores)}[self.kind]


@pytest.mark.parametrize("kind", ["tensor", "dict", "object"])
@pytest.mark.parametrize("pack", [lambda x, y: {"x": x, "labels": y}, lambda x, y: (x, y)])
def test_a_model_may_return_its_loss(kind, pack):
    model = OwnLoss(kind)
    step = X.Step(model, sgd(model), strategy=merging(3))
    out = step(pack(*batch()))
    assert_trained_like(model.net, lambda net: plain.mean_loss(net, batch()))
    expected = plain.mean_loss(plain.make_net(), batch()).item()
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)
    assert set(out.losses) == ({"a", "b"} if kind == "dict" else {"loss"})


def test_a_short_last_batch_is_fine():
    net = plain.make_net()
    step = X.Step(net, sgd(net), functional.cross_entropy, merging(8))
    step(batch(16))
    out = step(batch(3))
    assert (out.updated, out.samples) == (True, 3)


def test_a_device_side_items_count_works():
    net = plain.make_net()
    step = X.Step(
        net, sgd(net), functional.cross_entropy, merging(3), items=lambda micro: torch.tensor([len(micro[1])])
    )
    step(batch(16))
    assert_trained_like(net, lambda model: plain.mean_loss(model, batch()))


@pytest.mark.parametrize("count", [int, torch.tensor], ids=["on the host", "as tensors"])
def test_a_loss_without_any_items_leaves_the_others_alone(count):
    def compute(model, micro):
        loss = plain.mean_loss(model, micro)
        return {"words": loss * float("nan"), "samples": loss}

    net = plain.make_net()
    items = lambda micro: {"words": count(0), "samples": count(len(micro[1]))}  # noqa: E731
    step = X.Step(net, sgd(net), compute=compute, strategy=merging(3), items=items)
    out = step(batch())
    assert out.updated
    assert out.losses["words"].item() == 0
    assert_trained_like(net, lambda model: plain.mean_loss(model, batch()))


@pytest.mark.parametrize("count", [int, torch.tensor], ids=["on the host", "as tensors"])
def test_a_window_without_any_items_is_skipped(count):
    net = plain.make_net()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    compute = lambda model, micro: {"a": plain.mean_loss(model, micro), "b": plain.mean_loss(model, micro)}  # noqa: E731
    step = X.Step(net, sgd(net), compute=compute, strategy=merging(2), items=lambda _: {"a": count(0), "b": count(0)})
    assert step(batch()).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("on_device", [False, True], ids=["on the host", "on a device"])
@pytest.mark.parametrize("names", [("common", "rare"), ("common",), ("rare",)])
def test_a_micro_batch_without_items_has_a_zero_gradient_whatever_its_formula_says(monkeypatch, names, on_device):
    """The derivative of 0/0 is NaN: it must not reach a weight, and what it would reach has a gradient all the same."""
    if on_device:  # counts that stay tensors, as those of a GPU do
        monkeypatch.setattr(batch_step, "_as_count", lambda _name, count: count)
    net = plain.make_two_heads()
    step = X.Step(
        net,
        plain.make_optimizer("sgd", net),
        compute=lambda model, micro: {name: plain.weighed_losses(model, micro)[name] for name in names},
        items=lambda micro: {name: plain.weighed_items(micro)[name] for name in names},
        strategy=merging(plain.K_STEPS),
    )
    outs = [step(batch) for batch in plain.weighed_batches(1)]
    if names == ("rare",):  # every other window has no items at all
        assert [out.skipped for out in outs] == [False, True, False, True, False]
        return
    assert all(outs)
    reference = plain.train_weighed(1, names)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, reference[name], rtol=1e-12, atol=1e-12)


def test_a_model_that_works_in_place_on_its_input_does_not_overwrite_the_batch():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = plain.make_net()

        def forward(self, x):
            return self.net(x.mul_(0.5))

    model = InPlace()
    given, kept = batch(), batch()
    step = X.Step(model, sgd(model), functional.cross_entropy, merging())
    step(given)
    step(given)
    assert torch.equal(given[0], kept[0])
    assert_trained_like(model.net, lambda net: plain.mean_loss(net, (kept[0] * 0.5, kept[1])), n_updates=2)


class Unasked(TorchDispatchMode):
    """Fails where the host asks for a number: on a GPU it would wait there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_on_a_device_nothing_asks_for_counts_or_for_whether_the_window_is_skipped(monkeypatch):
    monkeypatch.setattr(batch_step, "_as_count", lambda _name, count: count)
    monkeypatch.setattr(Updater, "_skips_on_device", lambda *_: True)
    for module in (gradients, gradient_marks):
        monkeypatch.setattr(module, "is_at_hand", lambda _tensor: False)
    for of, late in ((NonFiniteWatch, "record"), (Window, "_require_unsuspected")):  # which look one window late
        monkeypatch.setattr(of, late, lambda *_: None)
    net = plain.make_two_heads()
    net.body = nn.Sequential(net.body, nn.BatchNorm1d(8).double())
    step = X.Step(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True),
        compute=lambda model, micro: plain.weighed_losses(model, micro) | {"reported": micro[2].sum() / 0},
        items=plain.weighed_items,
        strategy=merging(plain.K_STEPS),
        clip_norm=1.0,
    )
    batches = plain.weighed_batches(1)
    step(batches[0])
    with Unasked():
        outs = [step(batch) for batch in batches[1:]]
        outs += [step((batches[0][0] * float("nan"), *batches[0][1:]))]
    assert [out.skipped for out in outs] == [False] * 4 + [True]
    assert all(value.isfinite().all() for value in net.state_dict().values())


def test_a_failing_forward_leaves_a_clean_window():
    calls = []

    def sometimes_fails(model, micro):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("bad sample")
        return plain.mean_loss(model, micro)

    net = plain.make_net()
    step = X.Step(net, sgd(net), compute=sometimes_fails, strategy=merging())
    with pytest.raises(RuntimeError, match="bad sample"):
        step(batch())
    step(batch())
    assert_trained_like(net, lambda model: plain.mean_loss(model, batch()))


def test_amp_and_merge_and_lars_and_lamb_train_together():
    for amp in ({"dtype": "bfloat16"}, {"dtype": "float16"}, {"use_pure_bf16": True}, {"use_pure_fp16": True}):
        for layerwise in ("lars", "lamb"):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
            strategy = merging()
            strategy.update({"amp": True, "amp_configs": amp, layerwise: True})
            if layerwise == "lars":
                strategy.lars_configs = {"lars_coeff": 0.1, "exclude_from_weight_decay": ["norm", "bias"]}
                inner = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
            else:
                inner = torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-6)
            step = X.Step(net, inner, functional.cross_entropy, strategy, clip_norm=1.0)
            x = torch.randn(64, 6)
            y = (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()
            losses = [step((x, y)).loss.item() for _ in range(40)]
            assert losses[-1] < 0.5 * losses[0], (amp, layerwise, losses[0], losses[-1])


# Errors ----------------------------------------------------------------------------------------------------


def test_k_steps_beyond_the_first_batch():
    net = plain.make_net()
    step = X.Step(net, sgd(net), functional.cross_entropy, merging(32))
    with pytest.raises(ValueError, match=r"k_steps is 32, but the first batch has only 16 samples.*Lower k_steps"):
        step(batch(16))


@pytest.mark.parametrize(
    ("options", "wrong_batch", "error", "message"),
    [
        ({}, (torch.zeros(4, 6), torch.zeros(3)), ValueError, "share their first dimension"),
        ({}, torch.zeros(4, 6), TypeError, r"a batch is \(inputs, target\), not a Tensor.*compute="),
        ({}, (torch.zeros(4, 6),) * 3, TypeError, r"not a tuple of 3"),
        ({"compute": lambda m, b: m(b)}, batch()[0], ValueError, r"'loss' has shape \(4, 3\)"),
        ({"compute": lambda m, b: 3.0}, batch()[0], TypeError, "'loss' must be a tensor with one number, not a float"),
        ({"compute": lambda m, b: {}}, batch()[0], ValueError, "empty dict of losses"),
        ({"compute": lambda m, b: m(b).sum().detach()}, batch()[0], ValueError, "no trainable parameter"),
        ({"items": lambda b: -3}, batch(), ValueError, "items of 'loss' must be a number from 0 to 2.*53, not -3"),
        ({"items": lambda b: math.inf}, batch(), ValueError, "must be a number from 0 to 2.*53, not inf"),
        ({"items": lambda b: torch.ones(2)}, batch(), ValueError, r"one number, not a tensor of shape \(2,\)"),
        ({"items": lambda b: {"other": 3}}, batch(), ValueError, "no items of 'loss'.*items of 'other'"),
    ],
)
def test_what_a_step_cannot_take(options, wrong_batch, error, message):
    net = plain.make_net()
    step = X.Step(net, sgd(net), None if "compute" in options else functional.cross_entropy, merging(), **options)
    with pytest.raises(error, match=message):
        step(wrong_batch)
    assert step.optimizer.micro_batches_held == 0


def test_contradictory_arguments():
    net = plain.make_net()
    with pytest.raises(ValueError, match="loss_fn or compute, not both"):
        X.Step(net, sgd(net), functional.cross_entropy, compute=plain.mean_loss)
    with pytest.raises(TypeError, match=r"items must be a function.*-100"):
        X.Step(net, sgd(net), functional.cross_entropy, items=5)
    with pytest.raises(ValueError, match="avg=False adds them up"):
        X.Step(net, sgd(net), functional.cross_entropy, merging(avg=False), items=len)
    net = plain.make_net()
    strategy = merging()
    optimizer = fleet.distributed_optimizer(sgd(fleet.distributed_model(net, strategy)), strategy)
    with pytest.raises(ValueError, match="another strategy"):
        X.Step(net, optimizer, functional.cross_entropy, merging(2))
    with pytest.raises(ValueError, match=r"give scheduler, clip_norm to fleet.distributed_optimizer"):
        X.Step(net, optimizer, functional.cross_entropy, scheduler=object(), clip_norm=1.0)
    step = X.Step(net, optimizer, functional.cross_entropy)
    optimizer.minimize(plain.mean_loss(net, batch()))
    with pytest.raises(RuntimeError, match=r"already holds 1 micro-batches.*flush"):
        step(batch())


def test_losses_are_matched_by_name_and_must_stay_the_same():
    calls = []

    def turned_round(model, micro):
        loss = plain.mean_loss(model, micro)
        pair = [("a", loss), ("b", loss * 100)]
        calls.append(1)
        return dict(pair if len(calls) % 2 else pair[::-1])

    net = plain.make_net()
    out = X.Step(net, sgd(net), compute=turned_round, strategy=merging())(batch())
    assert out.losses["b"].item() == pytest.approx(100 * out.losses["a"].item())

    def sometimes_two(model, micro):
        calls.append(1)
        loss = plain.mean_loss(model, micro)
        return {"a": loss} if len(calls) % 2 else {"a": loss, "b": loss}

    net = plain.make_net()
    with pytest.raises(ValueError, match="every micro-batch must give the same losses"):
        X.Step(net, sgd(net), compute=sometimes_two, strategy=merging())(batch())


def test_amp_around_the_model_must_be_entered():
    net = nn.Sequential(nn.Linear(6, 3))
    strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "bfloat16"})
    step = X.Step(net, sgd(net), compute=lambda model, b: model[0](b[0]).sum(), strategy=strategy)
    with pytest.raises(ValueError, match=r"amp is on, but the loss was computed without calling model\(...\)"):
        step((torch.randn(4, 6), torch.zeros(4)))


def test_a_strategy_in_the_place_of_the_loss():
    net = plain.make_net()
    with pytest.raises(TypeError, match=r"loss_fn must be a function.*strategy=strategy"):
        X.Step(net, sgd(net), merging())
