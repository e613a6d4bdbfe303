"""Which entries of a dict of losses are trained, and which are only reported."""

import pytest
import torch
from torch import nn

import fleetx as X
from fleetx.losses import named_losses
from tests import plain
from tests.test_step import assert_trained_like, batch, merging, sgd


def entries(model, micro):
    """A loss of two parts, and what is known beside it."""
    scores = model(micro[0])
    ce, kl = nn.functional.cross_entropy(scores, micro[1]), 0.1 * scores.square().mean()
    correct = (scores.argmax(dim=1) == micro[1]).double()
    return {"ce": ce, "kl": kl, "acc": correct.mean(), "none": (correct * 0).sum() / 0}


CHOICES = {
    "the total and its parts": lambda e: {"loss": e["ce"] + e["kl"], **e},
    "parts": lambda e: e,
    "a part, and a function of it": lambda e: {"loss": e["ce"], "perplexity": e["ce"].exp().float(), "acc": e["acc"]},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("items", [None, lambda micro: len(micro[1])], ids=["samples", "items"])
def test_the_loss_is_trained_or_else_what_carries_a_gradient_and_the_rest_is_reported(choice, items):
    chosen = CHOICES[choice]
    if items is not None and choice == "parts":
        items = lambda micro: {"ce": len(micro[1]), "kl": len(micro[1])}  # noqa: E731
    net = plain.make_net()
    step = X.Step(net, sgd(net), compute=lambda *both: chosen(entries(*both)), strategy=merging(3), items=items)
    out = step(batch())

    def loss(model):
        found = entries(model, batch())
        return found["ce"] if choice.startswith("a part") else found["ce"] + found["kl"]

    assert out.updated
    assert_trained_like(net, loss)
    assert out.loss.item() == pytest.approx(loss(plain.make_net()).item(), rel=1e-12)
    whole = chosen(entries(plain.make_net(), batch()))
    assert out.losses.keys() == whole.keys()
    for name in whole.keys() - {"perplexity"}:  # which is not a mean over samples
        assert out.losses[name].item() == pytest.approx(whole[name].item(), rel=1e-12, nan_ok=True)


def test_a_part_that_the_loss_does_not_contain_is_not_forgotten():
    weight = torch.ones(3, requires_grad=True)
    ce, kl = (weight * 2).sum(), (weight * 2).square().mean()
    with pytest.raises(ValueError, match=r"'kl' carries a gradient which 'loss' does not contain. Add it.*detach"):
        named_losses({"loss": ce, "ce": ce, "kl": kl})
    temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="'penalty' carries a gradient which 'loss' does not contain"):
        named_losses({"loss": ce * temperature, "penalty": temperature.square()})
    assert named_losses({"loss": ce * temperature, "temperature": temperature}).trained == {"loss"}
    assert named_losses({"loss": ce, "kl": kl.detach()}).trained == {"loss"}
    assert named_losses({"loss": ce + kl, "kl": kl, "ce": ce.bfloat16()}).trained == {"loss"}


def test_a_task_that_a_micro_batch_lacks_may_be_a_constant_there():
    def compute(model, micro):
        loss = plain.mean_loss(model, micro)
        return {"always": loss, "rare": loss if micro[0][0, 0] == 1 else torch.zeros(())}

    x, y = batch(16)
    x[:, 0] = torch.arange(16) < 8
    net = plain.make_net()
    out = X.Step(net, sgd(net), compute=compute, strategy=merging(2))((x, y))
    assert_trained_like(net, lambda model: plain.mean_loss(model, (x, y)) + plain.mean_loss(model, (x[:8], y[:8])) / 2)
    assert out.loss.item() == pytest.approx((out.losses["always"] + out.losses["rare"]).item())
