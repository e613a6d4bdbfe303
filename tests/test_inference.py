"""torch's inference mode around what trains, and models that were made in it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fleetx as X
from fleetx import fleet, static
from fleetx.optim import Lamb, Lars, Muon

BATCH = torch.randn(6, 4), torch.randint(0, 2, (6,))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, images, labels):
        return functional.cross_entropy(self.linear(images), labels)


def prepared():
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model = fleet.distributed_model(Net(), strategy)
    return model, fleet.distributed_optimizer(sgd(model.parameters()), strategy)


def program(model):
    return static.Program(model=model, optimizer=sgd, compile=False)


def ways():
    """What trains, each with the name that a message gives it; made ready outside of inference mode."""
    model, optimizer = prepared()
    step = X.Step(model, optimizer)
    yield "Step", lambda: step(BATCH)
    other, merging = prepared()
    loss = other(*BATCH)
    yield "minimize", lambda: merging.minimize(loss)
    held, flushing = prepared()
    flushing.minimize(held(*BATCH))
    yield "flush", flushing.flush
    yield "fleet.distributed_model", lambda: fleet.distributed_model(Net())
    unwrapped = fleet.distributed_model(Net())
    yield "fleet.distributed_optimizer", lambda: fleet.distributed_optimizer(sgd(unwrapped.parameters()))
    for kind, options in ((Lars, {}), (Lamb, {}), (Muon, {"exclude_from_muon": []})):
        net = Net()
        net(*BATCH).backward()
        yield f"{kind.__name__}.step", kind(net.parameters(), lr=0.1, **options).step


def test_nothing_trains_in_inference_mode():
    for name, train in ways():
        with torch.inference_mode(), pytest.raises(RuntimeError, match=rf"^{name} was called while .* outside of that"):
            train()
        train()  # and nothing was spoilt


@pytest.mark.middle
def test_a_program_does_not_train_in_inference_mode():
    executor, trained = static.Executor(), program(Net())
    feed = dict(zip(("images", "labels"), BATCH, strict=True))
    executor.run(trained, feed=feed, fetch_list=["loss"])
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"^a program that trains was called while"):
        executor.run(trained, feed=feed, fetch_list=["loss"])
    executor.run(trained, feed=feed, fetch_list=["loss"])


@pytest.mark.parametrize(
    "train",
    [
        fleet.distributed_model,
        lambda net: X.Step(net, sgd(net.parameters())),
        lambda net: X.plan(net, dict(zip(("images", "labels"), BATCH, strict=True)), memory="1GiB"),
        lambda net: static.Executor().run(program(net), feed=dict(zip(("images", "labels"), BATCH, strict=True))),
    ],
    ids=["distributed_model", "Step", "plan", "program"],
)
def test_models_that_were_made_in_inference_mode_are_refused_by_name(train):
    with torch.inference_mode():
        net = Net()
    with pytest.raises(ValueError, match=r"the parameter 'linear.weight' was made while .*build or load .* outside"):
        train(net)
    net = nn.Sequential(Net(), nn.BatchNorm1d(2))
    with torch.inference_mode():
        net[1].running_mean = torch.zeros(2)
    with pytest.raises(ValueError, match=r"the buffer '1.running_mean' was made while .*put a clone in its place"):
        train(net)


@pytest.mark.parametrize("kind", [Lars, Lamb, lambda parameters, lr: Muon(parameters, lr=lr, exclude_from_muon=[])])
def test_parameters_that_were_made_in_inference_mode_are_refused(kind):
    with torch.inference_mode():
        net = Net()
    with pytest.raises(ValueError, match=r"parameter 0 of its group was made while torch.inference_mode was on"):
        kind(net.parameters(), lr=0.1)
