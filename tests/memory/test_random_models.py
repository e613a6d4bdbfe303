"""Models put together by chance, cut by chance: equal to the plain run to the last bit."""

import copy
import weakref

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fleetx import memory
from tests.memory.comparing import Example, assert_exact, in_precision, seed_of, step
from tests.memory.test_backward import Doubles, InPlace
from tests.memory.zoo import normal

WIDTH = 4
MODULES = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.BatchNorm1d(WIDTH),
    lambda: nn.LayerNorm(WIDTH),
    lambda: nn.Dropout(0.3),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2, inplace=True), nn.Tanh()),
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    lambda: nn.Identity(),
]


def wrote(a, b):
    a += b
    return a


def assigned(a, b):
    a[:, 0] = b[:, 1]
    return a


def filled(a, b):
    output = torch.empty_like(a)
    output[:, :2], output[:, 2:] = a[:, 2:], b[:, :2]
    return output


def without_gradient(a, b):
    with torch.no_grad():
        return (a * b).sin()


def in_bfloat16(a, b):
    with torch.autocast("cpu", torch.bfloat16):
        return (a @ b.t() @ a).to(a.dtype)


FUNCTIONS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "tanh": lambda a, b: a.tanh(),
    "write": wrote,
    "assign": assigned,
    "fill": filled,
    "relu in place": lambda a, b: F.relu(a, inplace=True),
    "cat and chunk": lambda a, b: torch.cat([a, b], -1).sigmoid().chunk(2, -1)[1],
    "view": lambda a, b: a.t().reshape(-1)[: a.numel()].view_as(a),
    "dropout": lambda a, b: F.dropout(a, 0.4),
    "noise": lambda a, b: a * torch.rand_like(b),
    "shuffle": lambda a, b: a[torch.randperm(len(a))],
    "softmax": lambda a, b: F.softmax(a @ b.t(), -1) @ b,
    "clone": lambda a, b: a.clone(),
    "detach": lambda a, b: a.detach() * b,
    "no grad": without_gradient,
    "bfloat16": in_bfloat16,
    "function": lambda a, b: Doubles.apply(a, b)[0],
    "function in place": lambda a, b: InPlace.apply(a * 0.1),
    "choose": lambda a, b: a if float(a.detach().sum()) > 0 else b,
}


class Program(nn.Module):
    """Steps that read two of the tensors so far and give another one."""

    def __init__(self, steps, shared):
        super().__init__()
        self.steps = steps
        self.made = nn.ModuleList()
        for kind, which, _, _ in steps:
            if kind == "module":
                self.made.append(MODULES[which % len(MODULES)]())
            if kind == "shared":
                self.made.append(shared[which % len(shared)])

    def forward(self, x, y):
        tensors, modules = [x, y], iter(self.made)
        for kind, which, left, right in self.steps:
            a, b = tensors[left % len(tensors)], tensors[right % len(tensors)]
            if kind == "function":
                tensors.append(list(FUNCTIONS.values())[which % len(FUNCTIONS)](a, b))
            else:
                tensors.append(next(modules)(a))
        return tensors[-1], tensors[-2]


class Random(nn.Module):
    def __init__(self, programs):
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        shared = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]
        self.blocks = nn.ModuleList(Program(steps, shared) for steps in programs)

    def forward(self, x):
        y = self.begin(x).tanh()
        x = y * 2
        for block in self.blocks:
            x, y = block(x, y)
        return x.sigmoid(), y


KINDS = st.sampled_from(["function", "function", "module", "shared"])
STEPS = st.lists(st.tuples(KINDS, st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=6)
STATES = st.tuples(st.sampled_from(["inputs", "dear", "everything"]), st.sampled_from(["device", "host"]))


def is_trainable(example, precision):
    """Writing in place may destroy what autograd saved; plain torch refuses that, and so may we.

    Or it makes a graph that knows itself, as `x += linear(x)` does; if no backward comes there, torch never lets go of
    it, nor of what is before it.
    """
    try:
        for number in range(3):
            torch.manual_seed(seed_of(number))  # what is chosen, and so what is written to, may depend on chance
            graph = Graph()
            watching = example.model.begin.register_forward_hook(graph.watch)
            step(example.model, example.batch(number), example.loss, precision)
            watching.remove()
            if graph.is_alive():
                return False
    except RuntimeError as error:
        assert "inplace" in str(error) or "does not require grad" in str(error)  # noqa: PT017
        return False
    return True


class Graph:
    """Tells whether the graph of a module's output still exists."""

    def watch(self, _module, _args, output):
        def known(_gradients):
            """Lives as long as the graph."""

        output.grad_fn.register_prehook(known)
        self._known = weakref.ref(known)

    def is_alive(self):
        return self._known() is not None


def test_a_graph_that_knows_itself_is_found():
    for writes in (False, True):
        linear, graph = nn.Linear(2, 2), Graph()
        linear.register_forward_hook(graph.watch)
        x = linear(torch.randn(3, 2))
        x = x.add_(linear(x)) if writes else x.add(linear(x))
        del x
        assert graph.is_alive() == writes


def check(programs, choices, precision="fp32"):
    torch.manual_seed(0)
    model = Random(programs)
    made = Example(model, lambda number: (normal(number, [4, 2, 4][number], WIDTH),))
    made.loss = lambda output: sum(tensor.float().square().mean() for tensor in output)
    trial = in_precision(Example(copy.deepcopy(model), made.batch, loss=made.loss), precision)
    assume(is_trainable(trial, precision))
    names = memory.outputs(model, *made.batch(0))
    modules = {id(module): name for name, module in model.named_modules()}  # of shared ones, one name
    allowed = [name for name in names if ":" in name or name in modules.values()]
    segments = {allowed[which % len(allowed)]: state for which, state in choices}
    assert_exact(made, [memory.Segment(name, *state) for name, state in segments.items()], precision)


CHOICES = st.lists(st.tuples(st.integers(0, 999), STATES), min_size=1, max_size=5)
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.mark.middle
@pytest.mark.filterwarnings("ignore:the forward did not come to", "ignore:.*the segment that ends at")
@settings(max_examples=100, suppress_health_check=QUIET)
@given(st.lists(STEPS, min_size=1, max_size=4), CHOICES)
def test_random_models_equal_the_plain_run(programs, choices):
    check(programs, choices)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:the forward did not come to", "ignore:.*the segment that ends at")
@settings(max_examples=3000, suppress_health_check=QUIET)
@given(st.lists(STEPS, min_size=1, max_size=6), CHOICES, st.sampled_from(["fp32", "fp64", "bf16"]))
def test_many_random_models_equal_the_plain_run(programs, choices, precision):
    check(programs, choices, precision)
