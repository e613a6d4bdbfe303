"""A skipped window leaves buffers as it leaves weights."""

import copy

import pytest
import torch
from torch import nn

from fleetx import buffers, fleet, update


class Counting(nn.Module):
    """Buffers of all sorts: statistics, a counter, one that is replaced, a constant, a large one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("mask", torch.ones(4).bool())
        self.register_buffer("queue", torch.zeros(64))

    def forward(self, x):
        hidden = self.norm(self.body(x)) * self.mask
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(dim=0)
            self.queue[self.calls % 64] = hidden.detach().max()
        return hidden


@pytest.fixture(params=["host", "device"])
def build(request, monkeypatch):
    """On a device nobody on the host knows whether the window is skipped."""
    if request.param == "device":
        monkeypatch.setattr(update.Updater, "_skips_on_device", lambda *_: True)

    def built(k_steps=2, watched=True):
        torch.manual_seed(0)
        strategy = fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": k_steps})
        model = fleet.distributed_model(Counting(), strategy)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        optimizer = fleet.distributed_optimizer(sgd, strategy)
        if not watched:
            model._forward_pre_hooks.clear()
        return model, optimizer

    return built


def train(model, optimizer, *values):
    outs = [optimizer.minimize(model(torch.eye(3) * value + 0.1).square().sum()) for value in values]
    return outs[-1]


def state(model):
    return copy.deepcopy(dict([*model.named_parameters(), *model.named_buffers()]))


def assert_same(ours, theirs):
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


NAN = float("nan")


def test_a_skipped_window_leaves_buffers_as_they_were_and_the_next_one_counts(build):
    model, optimizer = build()
    assert train(model, optimizer, 1, 2)
    before = state(model)
    assert train(model, optimizer, 3, NAN).skipped
    assert_same(state(model), before)
    assert train(model, optimizer, 5, 6).updated
    plain, twin = build()
    train(plain, twin, 1, 2, 5, 6)
    assert_same(state(model), state(plain))
    assert model.calls == 4


def test_what_is_loaded_or_estimated_between_windows_stays(build):
    model, optimizer = build()
    train(model, optimizer, 1, 2)
    model.norm.running_mean.fill_(7.0)
    model.queue = torch.full((64,), 8.0)
    with torch.no_grad():
        model(torch.eye(3))
    before = state(model)
    assert train(model, optimizer, 3, NAN).skipped
    assert_same(state(model), before)


def test_a_forward_that_cannot_be_seen_follows_the_last_window(build):
    model, optimizer = build(watched=False)
    train(model, optimizer, 1, 2)
    before = state(model)
    assert train(model, optimizer, NAN, 3).skipped
    assert_same(state(model), before)


def test_large_buffers_are_kept_once_they_were_seen_to_change(build, monkeypatch):
    monkeypatch.setattr(buffers, "LARGE", 100)
    model, optimizer = build()
    train(model, optimizer, 1, 2)
    before = state(model)
    assert train(model, optimizer, 3, NAN).skipped
    assert_same(state(model), before)
    model, optimizer = build()
    assert train(model, optimizer, 3, NAN).skipped  # in the first window nobody knew
    assert model.queue.isnan().any()
    assert not model.norm.running_mean.isnan().any()


def test_a_window_that_is_resumed_and_then_skipped_leaves_what_it_began_with(build):
    model, optimizer = build()
    train(model, optimizer, 1, 2)
    before = state(model)
    train(model, optimizer, NAN)
    saved = copy.deepcopy((state(model), model.state_dict(), optimizer.state_dict()))
    model, optimizer = build()
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    assert train(model, optimizer, 3).skipped
    for name in model.state_dict():
        assert torch.equal(model.state_dict()[name], before[name]), name


def test_what_is_loaded_after_a_forward_that_was_not_trained_on_stays(build):
    model, optimizer = build()
    model(torch.eye(3))  # a dry run, to see shapes
    loaded = {name: value + 1 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    assert train(model, optimizer, 3, NAN).skipped
    assert_same(dict(model.state_dict()), loaded)


def test_what_is_loaded_before_a_forward_that_cannot_be_seen_stays(build):
    model, optimizer = build(watched=False)
    train(model, optimizer, 1, 2)
    model.norm.load_state_dict({**model.norm.state_dict(), "running_mean": torch.full((4,), 7.0)})
    before = state(model)
    assert train(model, optimizer, 3, NAN).skipped
    assert_same(state(model), before)


def test_a_state_dict_is_kept_module_by_module(build, monkeypatch):
    model, optimizer = build()
    watch, keep, calls = optimizer.engine.buffers, buffers.WindowBuffers.keep, []
    monkeypatch.setattr(buffers.WindowBuffers, "keep", lambda self: (calls.append(1), keep(self)))
    for forwards in (0, 2):
        for _ in range(forwards):
            model(torch.eye(3))
        calls.clear()
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        assert len(calls) <= bool(forwards)
        kept = watch.state_dict()
        for name, buffer in watch.live().items():
            assert name.endswith(".mean") or kept[name].equal(buffer), name


def test_weights_loaded_last_do_not_hide_where_a_resumed_window_began(build):
    model, optimizer = build()
    before = state(model)
    train(model, optimizer, 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = build()
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    assert train(model, optimizer, NAN).skipped
    for name in model.state_dict():
        assert torch.equal(model.state_dict()[name], before[name]), name


def test_an_expanded_buffer_is_left_alone(build):
    model, optimizer = build()
    model.register_buffer("one", torch.ones(1).expand(4))
    before = state(model)
    assert train(model, optimizer, 3, NAN).skipped
    assert_same(state(model), before)


def test_the_model_of_parameters_that_were_added_later_counts(build):
    model, optimizer = build()
    head = fleet.distributed_model(nn.BatchNorm1d(4), optimizer.strategy)
    optimizer.add_param_group({"params": list(head.parameters())})
    before = state(head)
    for value in (3, NAN):
        out = optimizer.minimize(head(model(torch.eye(3) * value)).square().sum())
    assert out.skipped
    assert_same(state(head), before)


def test_a_resumed_window_in_which_large_buffers_were_not_kept_keeps_the_others(build, monkeypatch):
    monkeypatch.setattr(buffers, "LARGE", 100)
    model, optimizer = build()
    before = state(model)
    train(model, optimizer, 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = build()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train(model, optimizer, NAN).skipped
    for name in model.state_dict().keys() - {"queue"}:
        assert torch.equal(model.state_dict()[name], before[name]), name
    assert model.queue.isnan().any()  # as without the interruption: in its first window nobody knew


def test_buffers_of_several_models_are_known_by_their_parameters(build):
    def both():
        models = [fleet.distributed_model(nn.BatchNorm1d(4)) for _ in range(6)]
        order = [models[place] for place in (3, 0, 5, 1, 4, 2)]
        sgd = torch.optim.SGD([p for model in order for p in model.parameters()], lr=0.1)
        return order, fleet.distributed_optimizer(sgd)

    order, optimizer = both()
    for number, model in enumerate(order):
        model.running_mean.fill_(number)
    optimizer.engine.buffers.keep()
    saved = optimizer.engine.buffers.state_dict()
    assert [saved[f"{number}/.running_mean"].tolist() for number in range(6)] == [[number] * 4 for number in range(6)]
