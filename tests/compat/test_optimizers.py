"""Paddle's optimizers: their arguments, their numbers, and both ways to use them."""

import pytest
import torch
from torch import nn

from fleetx.compat import fleet, fluid, paddle
from fleetx.compat.optimizers import DistributedGuideOptimizer
from fleetx.compat.variables import LossVariable

Adam, Momentum = paddle.optimizer.Adam, paddle.optimizer.Momentum


def batches(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(n)]


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, 2, dtype=torch.float64)


def loss_of(model, batch):
    return model(batch).square().mean()


def gradients(model, batch):
    return torch.autograd.grad(loss_of(model, batch), list(model.parameters()))


def train(model, optimizer, count=6):
    for batch in batches(count):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.minimize(loss)
        optimizer.clear_grad()


def assert_equal(model, expected):
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [None, 0.01])
def test_momentum_follows_its_formula(nesterov, decay):
    """v = mu v + g, p = p - lr v; with Nesterov p = p - lr (g + mu v)."""
    model, expected = linear(), linear()
    parameters = model.parameters()
    train(model, Momentum(0.1, 0.9, parameters=parameters, use_nesterov=nesterov, weight_decay=decay))
    velocity = [torch.zeros_like(p) for p in expected.parameters()]
    for batch in batches(6):
        with torch.no_grad():
            for p, v, g in zip(expected.parameters(), velocity, _with_grad(expected, batch), strict=True):
                g = g + (decay or 0) * p
                v.mul_(0.9).add_(g)
                p.sub_(0.1 * (g + 0.9 * v if nesterov else v))
    assert_equal(model, expected)


def _with_grad(model, batch):
    with torch.enable_grad():
        return gradients(model, batch)


def test_momentum_is_torchs_sgd():
    model, expected = linear(), linear()
    train(model, Momentum(learning_rate=0.05, momentum=0.8, parameters=model.parameters()))
    sgd = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.8)
    for batch in batches(6):
        sgd.zero_grad()
        loss_of(expected, batch).backward()
        sgd.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_adam_follows_its_formula():
    model, expected = linear(), linear()
    train(model, Adam(0.01, beta1=0.8, beta2=0.95, epsilon=1e-6, parameters=model.parameters(), weight_decay=0.01))
    first = [torch.zeros_like(p) for p in expected.parameters()]
    second = [torch.zeros_like(p) for p in expected.parameters()]
    for t, batch in enumerate(batches(6), start=1):
        with torch.no_grad():
            grads = _with_grad(expected, batch)
            for p, m, s, g in zip(expected.parameters(), first, second, grads, strict=True):
                g = g + 0.01 * p
                m.mul_(0.8).add_(0.2 * g)
                s.mul_(0.95).add_(0.05 * g * g)
                p.sub_(0.01 * (m / (1 - 0.8**t)) / ((s / (1 - 0.95**t)).sqrt() + 1e-6))
    assert_equal(model, expected)


def test_step_is_minimize_without_a_loss():
    one, other = linear(), linear()
    for model, update in ((one, "minimize"), (other, "step")):
        optimizer = Momentum(0.1, parameters=model.parameters())
        loss = loss_of(model, batches(1)[0])
        loss.backward()
        optimizer.minimize(loss) if update == "minimize" else optimizer.step()
    assert_equal(one, other)


def test_the_guides_dynamic_recipe_sums_and_updates_after_the_first_batch():
    """`minimize` follows the user's own backward, as in Paddle. Our own example writes it otherwise, and says why."""
    model, expected, k = linear(), linear(), 2
    optimizer = Momentum(0.1, momentum=0.0, parameters=model.parameters())
    updated = []
    for batch_id, batch in enumerate(batches(5)):
        before = model.weight.detach().clone()
        avg_loss = loss_of(model, batch)
        avg_loss.backward()
        if batch_id % k == 0:
            optimizer.minimize(avg_loss)
            optimizer.clear_gradients()
        updated.append(not torch.equal(before, model.weight))
    assert updated == [True, False, True, False, True]
    data = batches(5)
    for group in (data[:1], data[1:3], data[3:5]):
        sums = [sum(parts) for parts in zip(*(gradients(expected, batch) for batch in group), strict=True)]
        with torch.no_grad():
            for p, g in zip(expected.parameters(), sums, strict=True):
                p.sub_(0.1 * g)
    assert_equal(model, expected)


def test_clear_grad_of_both_names():
    model = linear()
    optimizer = Adam(parameters=model.parameters())
    for clear in (optimizer.clear_grad, optimizer.clear_gradients):
        loss_of(model, batches(1)[0]).backward()
        clear()
        assert all(p.grad is None for p in model.parameters())
    Adam().clear_grad()  # a program clears by itself


# Distributed and dynamic ---------------------------------------------------------------------------------


def distributed(k_steps=2):
    strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps})
    model = fleet.distributed_model(linear(), strategy)
    optimizer = fleet.distributed_optimizer(Momentum(0.1, momentum=0.0, parameters=model.parameters()), strategy)
    return model, optimizer


def test_a_distributed_dynamic_optimizer_merges_as_the_strategy_says():
    model, optimizer = distributed()
    assert isinstance(optimizer, DistributedGuideOptimizer)
    updated = []
    for batch in batches(4):
        updated.append(bool(optimizer.minimize(loss_of(model, batch))))
        if updated[-1]:
            optimizer.clear_grad()
            model.clear_gradients()
    assert updated == [False, True, False, True]
    expected, data = linear(), batches(4)
    for group in (data[:2], data[2:]):
        means = [sum(parts) / 2 for parts in zip(*(gradients(expected, batch) for batch in group), strict=True)]
        with torch.no_grad():
            for p, g in zip(expected.parameters(), means, strict=True):
                p.sub_(0.1 * g)
    assert_equal(model, expected)


@pytest.mark.parametrize("clear", ["clear_grad", "clear_gradients"])
def test_clearing_in_the_middle_of_a_window_is_refused(clear):
    model, optimizer = distributed()
    optimizer.minimize(loss_of(model, batches(1)[0]))
    with pytest.raises(RuntimeError, match="in the middle of a window would lose 1 merged micro-batches"):
        getattr(optimizer, clear)()


def test_a_model_that_is_cleared_in_the_middle_of_a_window_is_noticed():
    model, optimizer = distributed()
    optimizer.minimize(loss_of(model, batches(1)[0]))
    model.clear_gradients()
    assert model.weight.grad is None
    with pytest.raises(RuntimeError, match="was changed outside of the optimizer.*zero_grad"):
        optimizer.minimize(loss_of(model, batches(1)[0]))
    optimizer.discard()


def test_a_backward_of_ones_own_before_a_distributed_minimize_is_refused():
    model, optimizer = distributed()
    loss = loss_of(model, batches(1)[0])
    loss.backward()
    with pytest.raises(RuntimeError, match="second time") as caught:
        optimizer.minimize(loss)
    assert any("Leave out your own loss.backward()" in note for note in caught.value.__notes__)


def test_a_distributed_optimizer_of_torch_is_ours():
    model = fleet.distributed_model(linear())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert optimizer.minimize(loss_of(model, batches(1)[0])).updated


def test_workers_are_not_left_to_train_alone(monkeypatch):
    model = linear()
    optimizer = Momentum(0.1, parameters=model.parameters())
    loss = loss_of(model, batches(1)[0])
    loss.backward()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"each of the 2 workers by itself: first wrap .*distributed_optimizer"):
        optimizer.minimize(loss)
    with pytest.raises(RuntimeError, match="step.. would train each"):
        optimizer.step()


# What is refused -------------------------------------------------------------------------------------------


def test_a_tensor_for_an_optimizer_without_parameters():
    with pytest.raises(ValueError, match=r"minimize of a tensor is for dynamic training.*parameters=model.parameters"):
        Momentum(0.1).minimize(torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match=r"step\(\) is for dynamic training.*minimize\(model.loss\)"):
        Adam().step()


def test_a_program_for_an_optimizer_with_parameters():
    model = linear()
    with pytest.raises(ValueError, match="a program, which brings its own parameters.*leave that out"):
        Momentum(0.1, parameters=model.parameters()).minimize(LossVariable(model))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Momentum("0.1"), TypeError, "learning_rate must be a number at least 0, got '0.1': .*scheduler"),
        (lambda: Momentum(-0.1), ValueError, "learning_rate must be .* got -0.1"),
        (
            lambda: Momentum(0.1, momentum=1.0),
            ValueError,
            "momentum must be a number .* below 1, got 1.0: 0.9 is usual",
        ),
        (lambda: Momentum(0.1, use_nesterov=1), TypeError, "use_nesterov must be True or False, got 1"),
        (lambda: Momentum(0.1, weight_decay=-1.0), ValueError, "weight_decay must be .* got -1.0: 1e-4 is usual"),
        (lambda: Momentum(0.1, grad_clip=1), TypeError, r"Momentum does not take grad_clip \(.*clip_norm"),
        (lambda: Momentum(0.1, parameter_list=[]), TypeError, r"parameter_list \(it is called parameters here\)"),
        (lambda: Adam(regularization=1), TypeError, r"regularization \(give weight_decay a number, which means L2\)"),
        (lambda: Adam(lazy_mode=True, name="a"), TypeError, r"lazy_mode \(leave it out\); name \(leave it out\)"),
        (lambda: Adam(float("nan")), ValueError, "learning_rate must be .* got nan"),
        (lambda: Adam(beta1=1.0), ValueError, "beta1 must be .* got 1.0: 0.9 is usual"),
        (lambda: Adam(beta2=-0.1), ValueError, "beta2 must be .* got -0.1"),
        (lambda: Adam(epsilon=0), ValueError, "epsilon must be a number above 0, got 0: 1e-8 is usual"),
    ],
)
def test_wrong_arguments_are_named_when_they_are_given(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_one_optimizer_by_both_names():
    assert fluid.optimizer.Adam is paddle.optimizer.Adam
    assert fluid.optimizer.Momentum is paddle.optimizer.Momentum
