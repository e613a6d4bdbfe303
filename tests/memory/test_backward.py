"""Ways to ask for gradients: partly, twice, of several forwards, of gradients."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fleetx import memory
from tests.memory.comparing import (
    STATES,
    Census,
    assert_exact,
    assert_nothing_left,
    assert_same,
    call,
    cycled,
    some_states,
)
from tests.memory.test_structures import example, in_each_state, linear
from tests.memory.zoo import MODELS, normal

CHAIN = ["a", "b", "c"]


def chain(model, x):
    hidden = model.b(F.dropout(model.a(x), 0.3).tanh()).sigmoid()
    return model.d(model.norm(model.c(hidden)) * hidden)


def make():
    return example(chain, norm=nn.BatchNorm1d(4))


@pytest.fixture(params=STATES)
def pair(request):
    """A plain model and one with a plan, equal."""
    made = make()
    plain = copy.deepcopy(made.model)
    applied = memory.apply(made.model, cycled(CHAIN, STATES[request.param]))
    yield plain, made.model
    assert_nothing_left(applied)


def both(pair, use, repetitions=3):
    """What `use` gives must be equal for both models, as often as it is used."""
    for repetition in range(repetitions):
        results = []
        for model in pair:
            torch.manual_seed(repetition)
            model.zero_grad()
            found = use(model, repetition)
            found += [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]
            results.append([*found, torch.get_rng_state()])
        assert len(results[0]) == len(results[1])
        for index, (theirs, mine) in enumerate(zip(*results, strict=True)):
            assert_same(mine, theirs, f"result {index}")


def test_autograd_grad_gives_some_gradients_and_then_the_others(pair):
    def use(model, step):
        x = normal(step, 3, 4).requires_grad_()
        loss = model(x).square().sum()
        first = torch.autograd.grad(loss, [model.d.weight, model.b.bias], retain_graph=True)
        return [*first, *torch.autograd.grad(loss, [x, *model.parameters()])]

    both(pair, use)


def test_two_backwards_of_one_forward(pair):
    def use(model, step):
        loss = model(normal(step, 3, 4)).square().sum()
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        return []

    both(pair, use)


def test_two_losses_of_one_forward(pair):
    def use(model, step):
        out = model(normal(step, 3, 4))
        out[:, 0].sum().backward(retain_graph=True)
        out[:, 1:].square().sum().backward()
        return []

    both(pair, use)


def test_a_third_backward_is_refused_as_torch_refuses_it(pair):
    for model in pair:
        loss = model(normal(0, 3, 4)).square().sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_two_forwards_before_one_backward(pair):
    def use(model, step):
        first, second = model(normal(step, 3, 4)), model(normal(step + 5, 2, 4))
        (first.square().sum() * second.square().sum()).backward()
        return []

    both(pair, use)


def test_several_forwards_and_backwards_in_any_order(pair):
    def use(model, step):
        losses = [model(normal(step + index, 2 + index, 4)).square().sum() for index in range(4)]
        for index in (2, 0, 3, 1):
            losses[index].backward()
        return []

    both(pair, use)


def test_the_output_of_a_forward_is_the_input_of_the_next(pair):
    def use(model, step):
        hidden = normal(step, 3, 4)
        for _ in range(3):
            hidden = model(hidden)
        hidden.square().sum().backward()
        return []

    both(pair, use)


def test_gradients_of_gradients(pair):
    def use(model, step):
        x = normal(step, 3, 4).requires_grad_()
        loss = model(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = (gradient.norm() - 1) ** 2 + sum(g.square().sum() for g in gradients)
        (loss + penalty).backward()
        return [x.grad]

    both(pair, use)


def test_backward_without_dropping_the_graph_and_with_hooks_on_tensors(pair):
    def use(model, step):
        seen = []
        x = normal(step, 3, 4).requires_grad_()
        out = model(x)
        out.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
        x.register_hook(lambda grad: seen.append(grad.clone()))
        out.sum().backward()
        return seen

    both(pair, use)


def test_a_loss_that_does_not_need_all_of_the_graph():
    def forward(model, x):
        hidden = model.a(x).tanh()
        aside = model.b(hidden).exp()
        return model.c(hidden).sigmoid(), aside

    in_each_state(lambda: example(forward, loss=lambda out: out[0].sum()), ["a", "b", "c"])


def test_no_grad_eval_and_eval_with_gradients(pair):
    def use(model, step):
        x = normal(step, 3, 4)
        with torch.no_grad():
            found = [model(x)]
        with torch.inference_mode():
            found.append(model(x).clone())
        model.eval()
        with torch.no_grad():
            found.append(model(x))
        out = model(x)
        out.square().sum().backward()
        model.train()
        loss = model(x).square().sum()
        loss.backward()
        return [*found, out.detach(), loss.detach()]

    both(pair, use)


def test_a_part_of_the_forward_under_no_grad_and_under_enable_grad():
    def forward(model, x):
        with torch.no_grad():
            fixed = model.b(model.a(x).relu())
        hidden = model.c(fixed * x)
        with torch.no_grad():
            weight = hidden.sigmoid()
            with torch.enable_grad():
                other = model.d(hidden.detach() * x)
        return hidden * weight + other

    for cuts in (["a"], ["b"], ["c"], ["a", "b", "c", "d"], [":sigmoid", "c"]):
        in_each_state(lambda: example(forward), cuts)


def test_autocast_regions_inside_of_a_forward():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                return self.linear(hidden.float())

    def forward(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.b(model.a(x).relu()) @ x.t()
        with torch.autocast("cpu", enabled=False):
            hidden = model.c(hidden.float() @ x)
        return model.mixed(hidden)

    for cuts in (["a"], ["b"], ["a", "b", "c", "mixed"], [":matmul", ":relu"]):
        for precision in ("fp32", "bf16"):
            in_each_state(lambda: example(forward, mixed=Mixed()), cuts, precision=precision)


def test_a_backward_inside_of_an_autocast_region():
    def step(model, batch, loss_of, precision):
        from tests.memory import comparing

        with torch.autocast("cpu", torch.bfloat16):
            return comparing.step(model, batch, loss_of, "fp32")

    for name in ("gpt", "resnet"):
        built = MODELS[name]()
        assert_exact(built, cycled(built.cuts["blocks"], STATES["mixed"]), step=step)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        product = x * y
        ctx.save_for_backward(x, y, product)
        return product, y + 1

    @staticmethod
    def backward(ctx, grad, other):
        x = ctx.saved_tensors[0]
        y, product = ctx.saved_tensors[1:]  # asks a second time
        return grad * y + product * 0.1, grad * x + other


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        product, other = Doubles.apply(self.linear(x), x)
        return InPlace.apply(product * 1) + other


KEPT = pytest.mark.filterwarnings("ignore:in the segment that ends at .* a torch.autograd.Function is called")


@KEPT
def test_functions_of_ones_own():
    def forward(model, x):
        hidden, other = Doubles.apply(model.a(x), x)
        hidden = model.b(hidden.tanh()) + model.custom(other)
        hidden = InPlace.apply(hidden.sin())
        _, other = Doubles.apply(hidden, model.c(hidden))
        return model.d(other)

    for cuts in (["a"], ["b"], ["custom"], ["c"], ["a", "b", "custom", "c"], [":tanh", ":sin"]):
        in_each_state(lambda: example(forward, custom=Custom()), cuts)


def test_what_a_function_of_ones_own_saves_between_modules_is_kept_and_told_of_once():
    made = example(lambda model, x: model.b(Doubles.apply(model.a(x), x)[0].tanh()))
    with pytest.warns(UserWarning, match="ends at b, a torch.autograd.Function is called between modules") as seen:
        assert_exact(made, ["a", "b"])
    assert len(seen) == 1


class Forces(nn.Module):
    """Computes a gradient in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.linear(x).tanh().square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + force


@KEPT
def test_gradients_that_a_forward_computes_itself():
    def forward(model, x):
        x = x.clone().requires_grad_()
        hidden = model.b(model.forces(model.a(x)).tanh())
        (inner,) = torch.autograd.grad(model.c(hidden).sin().sum(), x, create_graph=True)
        return model.d(inner * hidden)

    for cuts in (["a"], ["b"], ["a", "forces", "b", "c"], ["c"]):
        in_each_state(lambda: example(forward, forces=Forces()), cuts)


@KEPT
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_own_checkpoint_inside(reentrant):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(linear(), nn.Dropout(0.3), nn.Tanh(), linear())

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    def forward(model, x):
        hidden = model.again(model.a(x).tanh())
        return model.c(checkpoint(lambda h: model.b(h).sigmoid() * h, hidden, use_reentrant=reentrant))

    for cuts in (["a"], ["again"], ["a", "again", "b"], ["b", "c"]):
        for states in some_states():
            assert_exact(example(forward, again=Again()), cycled(cuts, states))


def test_hooks_of_others_on_saved_tensors():
    def forward(model, x):
        hidden = model.a(x).tanh()
        with torch.autograd.graph.save_on_cpu():
            hidden = model.b(hidden.sin())
        return model.c(hidden).sigmoid()

    for cuts in (["a"], ["b"], ["a", "b", "c"]):
        in_each_state(lambda: example(forward), cuts)


def test_each_segment_is_repeated_once_in_a_backward_and_not_at_all_if_everything_is_saved():
    counts = dict.fromkeys("abcd", 0)

    class Counted(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.linear = linear()
            self.name = name

        def forward(self, x):
            counts[self.name] += 1
            return self.linear(x).tanh().sigmoid()

    def forward(model, x):
        return model.d(model.c(model.b(model.a(x))))

    expected = {"inputs": 2, "dear": 2, "everything": 1}
    for save, count in expected.items():
        for home in ("device", "host"):
            made = example(forward, **{name: Counted(name) for name in "abcd"})
            memory.apply(made.model, ["a", "b", "c"], save=save, home=home)
            for _ in range(3):
                counts.update(dict.fromkeys("abcd", 0))
                made.loss(made.model(*made.batch(0))).backward()
                assert counts == {"a": count, "b": count, "c": count, "d": 1}


def test_what_comes_after_the_last_saved_tensor_is_not_repeated():
    counts = []

    class Counted(nn.Module):
        def forward(self, x):
            counts.append(1)
            return x + 1

    def forward(model, x):
        return model.b(model.last(model.a(x).tanh()))

    made = example(forward, last=Counted())
    memory.apply(made.model, ["last"])
    for expected in (2, 1, 1):  # in the first step all of it, to see that it gives the same
        counts.clear()
        made.model(*made.batch(0)).sum().backward()
        assert len(counts) == expected


def test_backwards_in_other_threads():
    """The device's thread runs a backward on a GPU; here one is made for it."""
    for states in some_states():
        made = make()
        plain = copy.deepcopy(made.model)
        applied = memory.apply(made.model, cycled(CHAIN, states))
        gradients = []
        for model in (plain, made.model):
            torch.manual_seed(0)
            losses = [model(normal(step, 3, 4)).square().sum() for step in range(4)]
            failures = []

            def run(loss, failures=failures):
                try:
                    loss.backward()
                except Exception as error:
                    failures.append(error)

            # One after the other: what several add to one gradient is not in order.
            for loss in losses:
                thread = threading.Thread(target=run, args=(loss,))
                thread.start()
                thread.join()
            assert not failures
            gradients.append([p.grad for p in model.parameters()])
            del losses, loss
        assert all(map(torch.equal, *gradients))
        assert_nothing_left(applied)


def test_forwards_of_two_models_in_two_threads_do_not_disturb_each_other():
    def train(built, steps, failures, found):
        try:
            for step in range(steps):
                built.loss(built.model(*built.batch(step))).backward()
            found.append([p.grad.clone() for p in built.model.parameters()])
        except Exception as error:
            failures.append(error)

    def forward(model, x):
        hidden = model.b(model.a(x).tanh())
        return model.d(model.c(hidden.sin()) * hidden)

    made = [example(forward) for _ in range(3)]
    failures, found = [], []
    train(made[0], 20, failures, found)
    for built in made[1:]:
        memory.apply(built.model, ["a", "b", "c"], home="host")
    threads = [threading.Thread(target=train, args=(built, 20, failures, found)) for built in made[1:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_full_backward_hooks_fire_once_with_the_same_gradients(pair):
    def use(model, step):
        seen = []
        handles = [
            module.register_full_backward_hook(lambda _, i, o: seen.extend([*i, *o]))
            for module in (model.b, model.c, model.norm)
        ]
        model(normal(step, 3, 4)).square().sum().backward()
        for handle in handles:
            handle.remove()
        return [None if grad is None else grad.clone() for grad in seen]

    both(pair, use)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("prepend", [False, True])
def test_hooks_of_others_happen_once_in_a_forward_and_again_when_repeated(when, prepend):
    """Hooks that change inputs and outputs belong to the module, whoever came first."""

    def hook(model):
        for module in (model.a, model.b, model.norm, model):
            module.register_forward_pre_hook(lambda _, args: (args[0].sin() * 2,), prepend=prepend)
            module.register_forward_hook(lambda _, args, output: output.sigmoid() * args[0] + output, prepend=prepend)

    for states in some_states():
        made = make()
        plain, segments = copy.deepcopy(made.model), cycled([*CHAIN, "norm"], states)
        hook(plain)
        if when == "before":
            hook(made.model)
            memory.apply(made.model, segments)
        else:
            memory.apply(made.model, segments)
            hook(made.model)
        both((plain, made.model), lambda model, step: [model(normal(step, 3, 4)).square().sum().backward()] * 0)


@pytest.mark.middle
@pytest.mark.parametrize("backward", [True, False], ids=["after a backward", "if backward is never called"])
@pytest.mark.parametrize("name", ["gpt", "unet", "mixture_of_experts", "lstm"])
def test_nothing_lives_on_though_nobody_collects_garbage(name, backward):
    for state in ("inputs", "dear-host", "mixed"):
        assert_freed(MODELS[name](), STATES[state], backward=backward)


@pytest.mark.full
@pytest.mark.parametrize("backward", [True, False], ids=["after a backward", "if backward is never called"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_of_any_model_lives_on_though_nobody_collects_garbage(name, state, backward):
    assert_freed(MODELS[name](), STATES[state], backward=backward)


def assert_freed(built, states, *, backward):
    """After a step all of its memory is free."""
    applied = memory.apply(built.model, cycled(built.cuts["blocks"], states))
    with Census():
        torch.ones(1).add(1)  # the first time torch's modes import something, and hold the frames where that was
    gc.collect()
    gc.disable()
    try:
        for step in range(2):
            batch = built.batch(step)
            with Census() as census:
                loss = built.loss(call(built.model, batch))
                if backward:
                    loss.backward()
            del loss, batch
            built.model.zero_grad()
            for module in built.model.modules():  # some keep a part of their last forward
                for key in [key for key, value in vars(module).items() if isinstance(value, torch.Tensor)]:
                    del vars(module)[key]
            assert len(census.known) > 10
            assert census.in_use(applied) == 0
            assert_nothing_left(applied)
    finally:
        gc.enable()
