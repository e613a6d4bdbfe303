"""The user compiles, traces or transforms a model that has a plan: it trains as the plain model does, done likewise."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

from fleetx import memory
from fleetx.memory import Segment
from fleetx.memory.names import find_cuts
from fleetx.memory.traced import Traceable
from tests.memory.comparing import assert_equal_outcomes, seed_of, step, sum_of_squares
from tests.memory.zoo import normal

pytestmark = pytest.mark.filterwarnings("ignore:::torch")
KEEPS = "ignore:compiled from outside, the model keeps what stem computes"
TRACED = "aot_eager"  # what traces forward and backward as inductor does, without its code generator


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.dropout(self.narrow(torch.relu_(self.wide(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Breaks(Block):
    def forward(self, x):
        x = self.wide(self.norm(x))
        torch._dynamo.graph_break()
        return self.dropout(self.narrow(x))


def sequential():
    first = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3)]
    return nn.Sequential(*first, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def compiled_in_place(model, **options):
    model.compile(**options)
    return model


def compiled_blocks(model, **options):
    for child in getattr(model, "blocks", model):
        child.compile(**options)
    return model


WAYS = {"torch.compile": torch.compile, "model.compile": compiled_in_place, "block.compile": compiled_blocks}
MODELS = {"blocks": (Net, ["blocks.*"]), "sequential": (sequential, ["3", "5"])}
ALL = [(way, model, save) for way in WAYS for model in MODELS for save in ("inputs", "dear")]
FEW = [
    ("torch.compile", "blocks", "inputs"),
    ("block.compile", "blocks", "inputs"),
    ("torch.compile", "sequential", "dear"),
]


def models(make=Net, cuts=("blocks.*",), save="inputs", **options):
    """A plain model, and its like with a plan."""
    torch.manual_seed(0)
    plain = make()
    ours = copy.deepcopy(plain)
    memory.apply(ours, [Segment(name, save) for name in cuts], **options)
    return plain, ours


def assert_trained_alike(calls, steps=3, step=step):
    """A plain model and one with a plan, or what calls them."""
    for number in range(steps):
        outcomes = []
        for call in calls:
            torch.manual_seed(seed_of(number))
            outcomes.append(step(call, (normal(number, 6, 4),), sum_of_squares))
        assert_equal_outcomes(outcomes[1], outcomes[0])


def bytes_saved(call):
    """By a forward, but for parameters."""
    saved = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(torch.compiler.disable(pack), lambda tensor: tensor):
        call(normal(0, 600, 4))
    return sum(saved.values())


# torch.compile ----------------------------------------------------------------------------------------------------


def assert_compiled_alike(way, model, save, backend=TRACED, **options):
    calls = [WAYS[way](one, backend=backend, **options) for one in models(*MODELS[model], save)]
    assert_trained_alike(calls)
    return calls


@pytest.mark.middle
@pytest.mark.filterwarnings(KEEPS)
@pytest.mark.parametrize(("way", "model", "save"), FEW)
def test_it_trains_as_the_compiled_plain_model(way, model, save):
    assert_compiled_alike(way, model, save)


@pytest.mark.full
@pytest.mark.filterwarnings(KEEPS)
@pytest.mark.filterwarnings("ignore:of the segment that ends at .* only the inputs are saved.*you compiled some")
@pytest.mark.parametrize(("way", "model", "save"), ALL)
def test_each_way_to_compile_trains_as_the_compiled_plain_model(way, model, save):
    assert_compiled_alike(way, model, save)


@pytest.mark.full
@pytest.mark.filterwarnings(KEEPS)
@pytest.mark.parametrize("save", ["inputs", "dear"])
def test_with_the_code_generator_it_is_one_graph_and_saves_less(save):
    plain, ours = assert_compiled_alike("torch.compile", "blocks", save, backend="inductor", fullgraph=True)
    assert bytes_saved(ours) < (0.4 if save == "inputs" else 0.9) * bytes_saved(plain)


@pytest.mark.middle
@pytest.mark.filterwarnings(KEEPS)
def test_it_saves_what_the_plan_asks_for_and_that_can_be_changed():
    plain, ours = models()
    calls = [torch.compile(one, backend=TRACED) for one in (plain, ours)]
    full, less = map(bytes_saved, calls)
    assert less < 0.4 * full
    assert_trained_alike(calls, steps=1)
    assert_trained_alike([plain, ours], steps=1)  # without a compiler the plan is what it was
    memory.applied_to(ours).remove()
    assert not any("forward" in vars(module) for module in ours.modules())
    assert bytes_saved(calls[0]) == bytes_saved(calls[1]) == full
    assert_trained_alike(calls, steps=1)


@pytest.mark.middle
@pytest.mark.filterwarnings(KEEPS)
def test_graphs_may_break_between_segments():
    class BreaksBetween(Net):
        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return self.head(x)

    assert_trained_alike([torch.compile(one, backend=TRACED) for one in models(BreaksBetween)])


@pytest.mark.middle
def test_a_submodule_that_the_user_compiled_runs_in_a_segment():
    def make():
        model = Net()
        model.blocks[1].wide = torch.compile(model.blocks[1].wide, backend=TRACED)
        model.blocks[2] = torch.compile(model.blocks[2], backend=TRACED)
        return model

    ours = make()
    reference = make()
    reference.load_state_dict(ours.state_dict())
    memory.apply(ours, ["blocks.*"])
    assert_trained_alike([reference, ours])


@pytest.mark.middle
def test_dear_outputs_of_modules_that_the_user_compiled_give_way_to_inputs():
    plain, ours = models(save="dear")
    for one in (plain, ours):
        one.blocks[1].compile(backend=TRACED)
    with pytest.warns(UserWarning, match=r"ends at blocks.1 only the inputs are saved.*you compiled some yourself"):
        assert_trained_alike([plain, ours])


def test_what_a_compiler_sees_of_a_plan():
    def traceable(model, *cuts, **options):
        return Traceable.of(find_cuts(model, [Segment(cut, **options) for cut in cuts]))

    net = Net()
    found = traceable(net, "blocks.*")
    assert [module for module, _ in found.modules] == list(net.blocks)
    assert found.kept == ["stem"]
    assert not found.refused
    chain = sequential()
    (runs,) = traceable(chain, "3", "5").sequentials.values()
    assert [(run.start, run.stop) for run in runs] == [(0, 4), (4, 6)]
    assert traceable(net, "blocks.*", save="everything").modules == []
    nested = nn.Sequential(nn.Linear(4, 4), chain, nn.Linear(1, 1))
    found = traceable(nested, "1.3", "1.5", "2")
    assert [[(run.start, run.stop) for run in runs] for runs in found.sequentials.values()] == [
        [(0, 4), (4, 6)],
        [(2, 3)],
    ]
    assert found.kept == ["0", "1.6"]


REFUSED = {
    "home='host' was asked for until 'blocks.0', .*": {"home": "host"},
    "'blocks.0:add' cuts inside of a module's own forward": {"cuts": ["blocks.0:add"]},
    "'blocks.0' is not cut, as others of its kind are": {"cuts": ["blocks.1"]},
    "'blocks.0' ends a segment and holds the ends of others": {"cuts": ["blocks.0.wide", "blocks.0"]},
}


@pytest.mark.middle
@pytest.mark.parametrize(("reason", "plan"), REFUSED.items(), ids=["host", "operation", "sparse", "nested"])
@pytest.mark.parametrize("way", ["torch.compile", "model.compile"])
def test_what_a_compiler_cannot_do_is_refused_by_name(reason, plan, way):
    model = Net()
    applied = memory.apply(model, plan.get("cuts", ["blocks.*"]), home=plan.get("home", "device"))
    call = WAYS[way](model, backend=TRACED)
    with pytest.raises(RuntimeError, match=rf"must not be compiled from outside.*{reason}. Let .*compile=True\)"):
        call(torch.randn(8, 4))
    applied.remove()
    call(torch.randn(8, 4)).sum().backward()
    assert model.stem.weight.grad is not None


@pytest.mark.middle
def test_a_plan_that_compiles_is_not_compiled_from_outside():
    model = Net()
    memory.apply(model, ["blocks.*"], compile=True, backend=TRACED)
    with pytest.raises(RuntimeError, match="compiles what runs between the cuts already: leave the other compilation"):
        torch.compile(model, backend=TRACED)(torch.randn(8, 4))


@pytest.mark.middle
@pytest.mark.filterwarnings(KEEPS)
@pytest.mark.parametrize(("make", "backend"), [(Breaks, TRACED), (Block, "eager")], ids=["breaks", "debugging"])
def test_eager_checkpoints_in_a_compiled_model_are_refused(make, backend):
    """They would count batch statistics twice."""
    model = Net()
    model.blocks = nn.ModuleList(make() for _ in range(2))
    memory.apply(model, ["blocks.*"])
    call = torch.compile(model, backend=backend)
    with pytest.raises(RuntimeError, match=r"it breaks the graph, or .*compile=True\)"):
        call(torch.randn(8, 4))


@pytest.mark.middle
def test_what_is_kept_is_told():
    _, ours = models()
    with pytest.warns(UserWarning, match=r"compiled from outside, the model keeps what stem computes.*compile=True\)"):
        torch.compile(ours, backend=TRACED)(torch.randn(8, 4))


def test_a_module_that_is_cut_inside_is_not_compiled_by_itself():
    model = nn.Sequential(Net(), nn.Linear(1, 1))
    memory.apply(model, ["0.blocks.*"])
    model[0].compile(backend=TRACED)
    with pytest.raises(RuntimeError, match="inside of the plan, and '0' is, which holds the ends of segments.*Put the"):
        model(torch.randn(8, 4))
    compiled = torch.compile(Net(), backend=TRACED)
    with pytest.raises(
        ValueError, match=r"inside of the plan, and this one \(the result of torch.compile\) is.*Put the"
    ):
        memory.apply(compiled, ["blocks.*"])


def test_other_models_may_be_compiled_beside_it():
    other = torch.compile(nn.Linear(4, 4), backend="eager")
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    memory.apply(model, ["1"])
    model(other(torch.randn(8, 4))).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.middle
@pytest.mark.filterwarnings(KEEPS)
def test_in_distributed_data_parallel(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        calls = [torch.compile(DistributedDataParallel(one), backend=TRACED) for one in models()]
        assert_trained_alike(calls)
        full, less = map(bytes_saved, calls)
        assert less < full
    finally:
        dist.destroy_process_group()


# Compiled autograd ------------------------------------------------------------------------------------------------


@pytest.mark.middle
@pytest.mark.filterwarnings(KEEPS)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_under_compiled_autograd(is_compiled):
    calls = models()
    if is_compiled:
        calls = [torch.compile(one, backend=TRACED) for one in calls]
        with torch._dynamo.config.patch(compiled_autograd=True):
            assert_trained_alike(calls)
    else:
        with torch._dynamo.compiled_autograd._enable(functools.partial(torch.compile, backend="eager")):
            assert_trained_alike(calls)


# torch.func and jit.trace -----------------------------------------------------------------------------------------

NOTHING = r"ignore:inside of torch\..* a plan does nothing"


@pytest.mark.filterwarnings(NOTHING)
def test_torch_func():
    found = []
    for model in models():
        model.eval()  # batch statistics cannot be written to under vmap

        def loss(parameters, x, model=model):
            return functional_call(model, parameters, (x.view(-1, 4),)).square().mean()

        parameters, x = dict(model.named_parameters()), normal(0, 6, 4)
        found.append([*grad(loss)(parameters, x).values(), *vmap(grad(loss), (None, 0))(parameters, x).values()])
    assert all(map(torch.equal, *found))


def test_inside_of_torch_func_a_plan_does_nothing_which_is_told_once():
    _, ours = models()
    ours.eval()
    parameters = dict(ours.named_parameters())
    transformed = grad(lambda given: functional_call(ours, given, (normal(0, 6, 4),)).sum())
    with pytest.warns(UserWarning, match="inside of torch.func a plan does nothing: all activations are kept"):
        transformed(parameters)
    transformed(parameters)
    assert_trained_alike(models(), steps=1)


@pytest.mark.middle
@pytest.mark.filterwarnings(NOTHING)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_jit_trace():
    plain, ours = (torch.jit.trace(one.eval(), normal(0, 6, 4)) for one in models())
    assert_trained_alike([plain, ours], steps=1)
