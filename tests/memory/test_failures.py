"""Errors in the middle of a step: nothing stays behind, and the next step is exact."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn

from fleetx import memory
from fleetx.memory.underway import active_run
from tests.memory.comparing import (
    Census,
    assert_equal_outcomes,
    assert_exact,
    assert_nothing_left,
    cycled,
    some_states,
    step,
)
from tests.memory.test_structures import example, in_each_state, linear
from tests.memory.zoo import normal


class Fails(nn.Module):
    """Computes, draws, changes a buffer; and fails when it is told to."""

    def __init__(self):
        super().__init__()
        self.linear = linear()
        self.norm = nn.BatchNorm1d(4)
        self.plan = []

    def forward(self, x):
        hidden = self.norm(self.linear(x))
        hidden = nn.functional.dropout(hidden, 0.2).tanh()
        plan = self.plan.pop(0) if self.plan else "go on"
        if plan == "fail in backward":
            hidden.register_hook(raises)
        if plan == "fail":
            raise torch.OutOfMemoryError("told to")
        return hidden.sigmoid()


def raises(_):
    raise torch.OutOfMemoryError("told to")


def forward(model, x):
    hidden = model.first(model.a(x).relu())
    hidden = model.second(model.b(hidden) * hidden)
    return model.c(model.third(hidden))


def make():
    return example(forward, first=Fails(), second=Fails(), third=Fails())


# Fails in a whole module, in a container (cut inside of it), before and behind cuts.
CUTS = {
    "whole": ["a", "first", "second", "third"],
    "inside": ["first.norm", "second.linear", "third.norm"],
    "ends": ["second"],
}
ERRORS = {
    "in forward": ["fail"],
    "in backward": ["fail in backward"],
    "when repeated": ["go on", "fail"],
}


@pytest.mark.parametrize("where", ["first", "second", "third"])
@pytest.mark.parametrize("when", ERRORS)
@pytest.mark.parametrize("cut", CUTS)
def test_after_out_of_memory_the_next_step_is_exact(cut, when, where):
    for states in some_states():
        made = make()
        plain = copy.deepcopy(made.model)
        applied = memory.apply(made.model, cycled(CUTS[cut], states))
        for number in range(2):
            made.model.get_submodule(where).plan = list(ERRORS[when])
            fail(made, number)
            made.model.get_submodule(where).plan = []
            assert_nothing_left(applied)
            # A failed forward has changed the running statistics; so it would have without a plan.
            made.model.load_state_dict(plain.state_dict())
            outcomes = []
            for model in (plain, made.model):
                torch.manual_seed(number)
                outcomes.append(step(model, made.batch(number), made.loss))
            assert_equal_outcomes(outcomes[1], outcomes[0])
            assert_nothing_left(applied)


def fail(made, number):
    """A step that fails, if the part of the model that fails is come to; leaves nothing in memory."""
    torch.manual_seed(number)
    made.model.zero_grad()
    with suppress(torch.OutOfMemoryError):
        made.loss(made.model(*made.batch(number))).backward()


def test_errors_are_those_of_the_model():
    made = make()
    memory.apply(made.model, CUTS["whole"])
    for kind, plan in ERRORS.items():
        made.model.second.plan = list(plan)
        with pytest.raises(torch.OutOfMemoryError, match="told to"):
            made.loss(made.model(*made.batch(0))).backward()
        assert not made.model.second.plan, kind


def test_a_failed_step_frees_its_memory():
    for states in some_states():
        made = make()
        applied = memory.apply(made.model, cycled(CUTS["whole"], states))
        fail(made, 0)
        for plan in ERRORS.values():
            made.model.second.plan = list(plan)
            with Census() as census:
                fail(made, 1)
            made.model.zero_grad()
            assert census.in_use(applied) == 0


@pytest.mark.filterwarnings("ignore:the forward did not come to")
@pytest.mark.filterwarnings("ignore:the segment that ends at .* a module failed in it")
def test_a_forward_may_catch_an_error_and_go_on():
    class Fallible(Fails):
        def forward(self, x):
            self.plan = ["fail"] if x.shape[0] == 3 else []
            return super().forward(x)

    def tries(model, x):
        hidden = model.a(x)
        try:
            hidden = model.fails(hidden).sin()
        except torch.OutOfMemoryError:
            hidden = model.b(hidden)
        return model.c(nn.functional.dropout(hidden, 0.5)).tanh()

    for cuts in (["a"], ["c"], ["a", "fails", "b", "c"], ["fails.linear", "b"]):
        for states in some_states():
            made = example(tries, fails=Fallible())
            made.batch = lambda step: (normal(step, [3, 2, 3, 3][step], 4),)
            assert_exact(made, cycled(cuts, states), steps=4)


@pytest.mark.parametrize("where", ["in a module", "between modules"])
def test_a_forward_that_was_interrupted_from_the_keyboard(where):
    """torch does not tell hooks of it; the next forward tidies up."""

    class Interrupted(nn.Module):
        is_on = False

        def forward(self, x):
            if self.is_on:
                raise KeyboardInterrupt
            return x.sin()

    def interrupted(model, x):
        hidden = model.a(x).tanh()
        hidden = model.stops(hidden)
        if model.stops.is_on:
            raise KeyboardInterrupt
        return model.c(model.b(hidden).tanh())

    for states in some_states():
        made = example(interrupted, stops=Interrupted())
        plain = copy.deepcopy(made.model)
        applied = memory.apply(made.model, cycled(["a", "b"], states))
        for number in range(3):
            made.model.stops.is_on = True
            if where == "between modules":
                made.model.stops.forward = torch.sin
            with pytest.raises(KeyboardInterrupt):
                made.model(*made.batch(0))
            made.model.stops.__dict__.pop("forward", None)
            made.model.stops.is_on = False
            outcomes = []
            for model in (made.model, plain):  # ours first: it is ours to tidy up
                torch.manual_seed(number)
                outcomes.append(step(model, made.batch(number), made.loss))
            assert_equal_outcomes(*outcomes)
            assert_nothing_left(applied)


class Interrupts(nn.Module):
    """Interrupts in its own forward, or tells its container to."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.is_on = False

    def forward(self, x):
        if self.is_on and self.where == "in a module":
            raise KeyboardInterrupt
        return x.sin()


def interrupted_example(where):
    def forward(model, x):
        hidden = model.stops(model.a(x).tanh())
        if model.stops.is_on:
            raise KeyboardInterrupt
        return model.c(model.b(hidden).tanh())

    return example(forward, stops=Interrupts(where))


def interrupt(made):
    made.model.stops.is_on = True
    with pytest.raises(KeyboardInterrupt):
        made.model(*made.batch(0))
    made.model.stops.is_on = False


@pytest.mark.middle
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("where", ["in a module", "between modules"])
def test_after_an_interrupt_other_models_are_not_listened_to_for_long(where, is_known):
    for states in some_states():
        made = interrupted_example(where)
        applied = memory.apply(made.model, cycled(["a", "b"], states))
        if is_known:
            made.loss(made.model(*made.batch(0))).backward()
        interrupt(made)
        other = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Sigmoid(), linear())
        with Census() as census:
            for number in range(100):
                other(normal(number, 5, 4)).sum().backward()
            del other
        assert active_run() is None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert census.in_use(applied) == 0
        made.loss(made.model(*made.batch(0))).backward()
        assert_nothing_left(applied)


@pytest.mark.parametrize("where", ["in a module", "between modules"])
def test_after_an_interrupt_the_next_model_with_a_plan_tidies_up(where):
    for states in some_states():
        made, other = interrupted_example(where), interrupted_example(where)
        applied = memory.apply(made.model, cycled(["a", "b"], states))
        plain = copy.deepcopy(other.model)
        memory.apply(other.model, cycled(["a", "b"], states))
        for number in range(3):
            interrupt(made)
            outcomes = []
            for model in (other.model, plain):
                torch.manual_seed(number)
                outcomes.append(step(model, other.batch(number), other.loss))
            assert_equal_outcomes(*outcomes)
            assert_nothing_left(applied)


def test_a_long_forward_is_not_taken_for_one_that_was_left():
    """Far more is saved in a segment than in the forward before."""

    def forward(model, x, rounds):
        for _ in range(rounds):
            x = model.long(x).sin() * x
        return model.b(x)

    class Long(nn.Module):
        def forward(self, x):
            for _ in range(len(x) * 40):
                x = x.sin()
            return x

    def build():
        made = example(forward, long=Long())
        made.batch = lambda step: (normal(step, 1 + 2 * step, 4), [1, 9, 2][step])
        return made

    for cuts in (["b"], ["long"], ["long", "b"]):
        in_each_state(build, cuts)


def test_the_hosts_memory_is_limited_with_a_clear_error():
    made = example(lambda model, x: model.d(model.c(model.b(model.a(x).tanh()).tanh()).tanh()), 3000, 4)
    applied = memory.apply(made.model, ["a", "b", "c"], home="host", host_memory=2**14)
    for _ in range(2):
        with pytest.raises(MemoryError, match="host_memory"):
            made.model(*made.batch(0))
        assert_nothing_left(applied)
    assert applied.statistics()["host_reserved"] == 0


def test_a_model_that_calls_itself():
    def recursive(model, x, depth):
        hidden = model.a(x).tanh()
        if depth > 0:
            hidden = hidden + model(hidden, depth - 1)
        return model.b(hidden).sigmoid()

    def build():
        made = example(recursive)
        made.batch = lambda step: (normal(step, 3, 4), [2, 0, 3][step])
        return made

    for cuts in (["a"], ["b"], ["a", "b"], [":add"]):
        if cuts == [":add"]:
            for states in some_states():
                assert_exact(build(), cycled(cuts, states))
        else:
            in_each_state(build, cuts)
