"""What modules hold and draw: running statistics, random numbers, attributes."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fleetx import memory
from fleetx.memory.recompute import Repetition
from fleetx.memory.tape import pointer_of
from tests.memory.comparing import STATES, assert_exact, cycled, some_states, step
from tests.memory.test_structures import example, in_each_state, linear
from tests.memory.zoo import normal

NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "cumulative": lambda: nn.BatchNorm1d(4, momentum=None),
    "without affine": lambda: nn.BatchNorm1d(4, affine=False),
    "untracked": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "sync batch norm": lambda: nn.SyncBatchNorm(4),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(linear()),
    "old spectral norm": lambda: nn.utils.spectral_norm(linear()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(linear()),
}


@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_updated_once(kind):
    def forward(model, x):
        hidden = model.norm(model.a(x).tanh())
        return model.c(model.norm(model.b(hidden).sigmoid()))

    for cuts in (["a", "b"], ["norm"], ["c"]):
        in_each_state(lambda: example(forward, 5, 4, norm=NORMS[kind]()), cuts)


def test_a_norm_that_is_frozen_and_thawed_and_one_that_runs_without_gradients():
    def forward(model, x, way):
        model.norm.train(way != 1)
        hidden = model.norm(model.a(x))
        with torch.no_grad():
            model.other(hidden)
        return model.c(model.b(hidden) + model.other(hidden).tanh())

    def make():
        made = example(forward, norm=nn.BatchNorm1d(4), other=nn.BatchNorm1d(4))
        made.batch = lambda step: (normal(step, 5, 4), step % 2)
        return made

    for cuts in (["a", "b"], ["norm", "other"], ["b"]):
        in_each_state(make, cuts, steps=4)


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        hidden = self.linear(x)[torch.randperm(len(x))]
        hidden = hidden * torch.bernoulli(torch.full_like(hidden, 0.7)) + torch.randn(hidden.shape)
        hidden = hidden * torch.rand(4, generator=self.generator) + torch.empty_like(hidden).uniform_()
        hidden = hidden.tanh() * random.random() + np.random.rand()
        return F.dropout(hidden, 0.3).sigmoid()


@pytest.mark.filterwarnings("ignore:the forward did not come to c")
def test_random_numbers_are_drawn_once():
    generator = torch.Generator()

    def forward(model, x):
        generator.manual_seed(len(x))
        hidden = model.draws(model.a(x)).sin() * torch.rand_like(x)
        hidden = hidden[torch.randperm(len(x))] * torch.normal(0, 1, x.shape, generator=generator)
        hidden = hidden + torch.empty_like(x).bernoulli_(0.5) * random.random()
        hidden = model.draws(model.b(hidden).tanh()) * torch.rand(4, generator=generator).to(hidden.dtype)
        if np.random.rand() < 0.5:
            hidden = model.c(hidden).tanh()
        return model.d(F.dropout(hidden, 0.3) ** 2)

    def seeded(model, batch, loss, precision):
        random.seed(int(batch[0][0, 0] * 1000))
        np.random.seed(abs(int(batch[0][0, 1] * 1000)))
        outcome = step(model, batch, loss, precision)
        outcome.buffers["python"] = torch.tensor([random.random(), np.random.rand()])
        outcome.buffers["generators"] = torch.stack([generator.get_state(), model.draws.generator.get_state()])
        return outcome

    for cuts in (["a", "b"], ["draws"], ["a", "draws", "b", "c", "d"], [":rand_like", ":normal", ":bernoulli"]):
        for states in some_states():
            assert_exact(example(forward, draws=Draws()), cycled(cuts, states), step=seeded, steps=4)


def test_a_buffer_that_changes_only_later_is_noticed():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("table", torch.ones(3))

        def forward(self, x, late):
            hidden = self.linear(x) * (1 + self.mean.clone())
            if late:
                self.mean.add_(hidden.detach().mean(0))
            return hidden.tanh() * self.table[0]

    def forward(model, x, late):
        return model.b(model.late(model.late(model.a(x), late), late))

    def make():
        made = example(forward, late=Late())
        made.batch = lambda step: (normal(step, 3, 4), step >= 2)
        return made

    for cuts in (["a", "late"], ["b"]):
        in_each_state(make, cuts, steps=5)


def test_a_buffer_that_is_replaced():
    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("last", torch.zeros(1, 4), persistent=False)

        def forward(self, x):
            hidden = self.linear(x) * (self.mean + 1) + self.last.mean(0)
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            self.last = hidden.detach().sin()
            return hidden.tanh() * self.mean.exp()

    def forward(model, x):
        return model.b(model.replaces(model.replaces(model.a(x)))) + model.replaces.mean

    def make():
        made = example(forward, replaces=Replaces())
        made.batch = lambda step: (normal(step, [3, 5, 2, 4][step], 4),)
        return made

    for cuts in (["a", "replaces"], ["replaces"], ["b"]):
        in_each_state(make, cuts, steps=4)


def test_two_forwards_before_a_backward_change_buffers_twice():
    def two(model, batch, loss, precision):
        first = loss(model(*batch))
        second = loss(model(batch[0] * 2))
        (first * second).backward()
        return step(model, batch, loss, precision)

    def forward(model, x):
        return model.c(model.norm(model.b(model.spectral(model.a(x).tanh())).sigmoid()))

    for states in some_states():
        made = example(
            forward, 5, 4, norm=nn.BatchNorm1d(4), spectral=nn.utils.parametrizations.spectral_norm(linear())
        )
        assert_exact(made, cycled(["a", "b", "norm"], states), step=two)


def test_constants_may_be_shared_and_cast():
    """Buffers that nobody changes are read where they are."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.randn(10, 4), persistent=False)

        def forward(self, x):
            return x * self.table[: len(x)]

    def forward(model, x):
        return model.b(model.rotary(model.a(x)) * model.rotary.table[:1])

    in_each_state(lambda: example(forward, rotary=Rotary()), ["a", "rotary"])
    in_each_state(lambda: example(forward, rotary=Rotary()), ["b"])


def test_lazy_modules():
    def forward(model, x):
        return model.b(model.lazy(model.a(x)).tanh())

    for cuts in (["a", "lazy"], ["b"]):
        for states in some_states():
            torch.manual_seed(0)
            made = example(forward, lazy=nn.LazyLinear(4))
            applied = memory.apply(made.model, cycled(cuts, states))
            made.loss(made.model(*made.batch(0))).backward()
            assert made.model.lazy.weight.grad is not None
            applied.remove()
            assert_exact(made, cycled(cuts, states))


def test_a_model_whose_parameters_are_views_of_one_memory():
    """As optimizers and reducers do that keep everything in a row."""

    def flat(model):
        memory_of_all = torch.cat([p.detach().flatten() for p in model.parameters()])
        start = 0
        for parameter in model.parameters():
            parameter.data = memory_of_all[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def forward(model, x):
        return model.c(model.b(model.a(x).tanh()).sigmoid())

    def make():
        made = example(forward)
        flat(made.model)
        return made

    in_each_state(make, ["a", "b"])


@pytest.mark.parametrize("state", STATES)
def test_a_functional_call_with_other_weights(state):
    """While a module is repeated it has the weights that it was called with."""

    def forward(model, x):
        return model.d(model.c(model.norm(model.b(model.a(x).tanh()).sigmoid())).tanh())

    made = example(forward, norm=nn.BatchNorm1d(4))
    plain = copy.deepcopy(made.model)
    memory.apply(made.model, cycled(["a", "b", "norm"], STATES[state]))
    for number in range(3):
        found = []
        for model in (plain, made.model):
            weights = {name: p.detach() * (1 + number) for name, p in model.named_parameters()}
            weights = {name: weight.requires_grad_() for name, weight in weights.items()}
            # One step inside, as in learning to learn, then the loss with the weights after it.
            inner = torch.func.functional_call(model, weights, normal(number, 3, 4)).square().sum()
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            after = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            outer = torch.func.functional_call(model, after, normal(number + 9, 3, 4)).square().sum()
            found.append([outer.detach(), *torch.autograd.grad(outer, list(weights.values())), *model.buffers()])
        assert all(map(torch.equal, *found))


def test_parameters_that_are_replaced_between_forward_and_backward():
    def forward(model, x):
        return model.c(model.b(model.a(x).tanh()).sigmoid())

    made = example(forward)
    plain = copy.deepcopy(made.model)
    memory.apply(made.model, ["a", "b"])
    gradients = []
    for model in (plain, made.model):
        loss = made.loss(model(*made.batch(0)))
        weights = [model.a.weight, model.b.weight]
        model.a.weight, model.b.weight = (nn.Parameter(weight.detach() * 2) for weight in weights)
        loss.backward()
        gradients.append([weight.grad for weight in weights])
    assert all(map(torch.equal, *gradients))


def test_memory_of_a_copy_stays_its_own_though_the_copy_gets_other_memory():
    """Else a tensor that happens to get it would be taken for a buffer's copy, which autograd is not asked about."""
    repetition = Repetition.__new__(Repetition)
    repetition.copies = {}
    copy = torch.randn(16)
    pointer = pointer_of(copy)
    repetition._note_copy(copy)
    copy.data = torch.randn(16)
    assert pointer not in {pointer_of(torch.empty(16)) for _ in range(3)}
    assert pointer not in {pointer_of(one) for one in [torch.empty(16) for _ in range(64)]}
