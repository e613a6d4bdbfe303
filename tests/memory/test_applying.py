"""Putting a plan on a model and taking it off: what is named, what is refused, what the model looks like then."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

from fleetx import memory
from fleetx.memory import Segment
from fleetx.memory.underway import active_run
from tests.memory.comparing import STATES, assert_equal_outcomes, assert_exact, cycled, step
from tests.memory.test_structures import example
from tests.memory.zoo import MODELS, gpt, normal, resnet, vit


def looks(model):
    """Everything about a model's modules that a plan could have changed."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        found[name]["forward is its class's"] = "forward" not in vars(module)
        found[name]["class"] = type(module)
    return found


def same_looks(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].keys() == other[name].keys()
        for key, value in one[name].items():
            assert value is other[name][key] or value == other[name][key], (name, key)


def train(model, built, number):
    torch.manual_seed(number)
    return step(model, built.batch(number), built.loss)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ["gpt", "resnet", "gan", "mixture_of_experts"])
def test_a_plan_that_was_removed_leaves_nothing(name, state):
    built = MODELS[name]()
    before = looks(built.model)
    keys = list(built.model.state_dict())
    applied = memory.apply(built.model, cycled(built.cuts["blocks"], STATES[state]))
    assert list(built.model.state_dict()) == keys
    applied.remove()
    same_looks(looks(built.model), before)
    applied = memory.apply(built.model, cycled(built.cuts["blocks"], STATES[state]))
    built.model(*built.batch(0))
    applied.remove()
    changed = looks(built.model)
    for ours, theirs in zip(changed.values(), before.values(), strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            if "hooks" in key or key == "forward":
                assert ours[key] == theirs[key]
    assert memory.applied_to(built.model) is None
    train(built.model, built, 0)


def test_removing_twice_and_between_forward_and_backward():
    built = gpt()
    plain = copy.deepcopy(built.model)
    applied = memory.apply(built.model, cycled(built.cuts["blocks"], STATES["mixed"]))

    def removing(model, batch, loss, precision="fp32"):
        value = loss(model(*batch))
        if model is built.model:
            applied.remove()
        value.backward()
        return train(model, built, 1)

    outcomes = []
    for model in (plain, built.model):
        torch.manual_seed(0)
        outcomes.append(removing(model, built.batch(0), built.loss))
    assert_equal_outcomes(outcomes[1], outcomes[0])
    applied.remove()
    memory.apply(built.model, built.cuts["one"])


def test_other_hooks_stay():
    built = vit()
    calls = []
    handle = built.model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    applied = memory.apply(built.model, built.cuts["blocks"])
    later = built.model.blocks[1].register_forward_pre_hook(lambda *_: calls.append(2))
    applied.remove()
    built.model(*built.batch(0))
    assert calls == [1, 2]
    handle.remove()
    later.remove()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_copies_of_a_model_have_its_plan(how, used):
    built = gpt()
    applied = memory.apply(built.model, cycled(built.cuts["blocks"], STATES["mixed"]))
    if used:
        train(built.model, built, 0)
        train(built.model, built, 1)
        built.model.zero_grad()
    other = copied(built.model, how)
    plain = copied(built.model, how)
    memory.applied_to(plain).remove()
    assert memory.applied_to(plain) is None
    plan = memory.applied_to(other)
    assert plan.experience is not applied.experience
    assert {id(m) for m in plan.experience.cuts.leaves.values()} <= {id(m) for m in other.modules()}
    assert str(plan) == str(applied)
    for number in range(3):
        expected = train(plain, built, number)
        assert_equal_outcomes(train(other, built, number), expected)
        if number == 0:
            assert_equal_outcomes(train(built.model, built, number), expected)
    plan.remove()
    assert memory.applied_to(other) is None
    assert memory.applied_to(built.model) is not None


def copied(model, how):
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def test_state_dicts_go_both_ways():
    built = resnet()
    plain = copy.deepcopy(built.model)
    memory.apply(built.model, built.cuts["blocks"])
    assert built.model.state_dict().keys() == plain.state_dict().keys()
    train(built.model, built, 0)
    plain.load_state_dict(built.model.state_dict())
    assert_equal_outcomes(train(built.model, built, 1), train(plain, built, 1))


def test_a_model_may_be_moved_and_cast_after_the_plan_was_made():
    built = vit()
    memory.apply(built.model, built.cuts["blocks"])
    train(built.model, built, 0)
    built.model.double()
    images = built.batch(1)[0].double()
    built.loss(built.model(images)).backward()
    assert built.model.head.weight.grad.dtype == torch.float64


# Names ------------------------------------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_near_ones():
    with pytest.raises(ValueError, match=r"no module is called 'block.1' \(near: blocks.1, .*fleetx.memory.outputs"):
        memory.apply(gpt().model, ["block.1"])
    with pytest.raises(ValueError, match="no module is called 'bloks' .near: blocks"):
        memory.apply(gpt().model, ["bloks:add"])
    with pytest.raises(ValueError, match="no module is called 'blocks.9'"):
        memory.apply(gpt().model, ["blocks.9"])
    with pytest.raises(ValueError, match="'zzz' is neither"):
        memory.apply(gpt().model, [Segment("blocks.1", "dear", dear=("zzz",))])


def test_modules_that_are_never_called_are_refused_with_a_remedy():
    for name in ("blocks", "blocks:add"):
        with pytest.raises(ValueError, match=r"'blocks' is a ModuleList, which is never called .*'blocks.\*'"):
            memory.apply(gpt().model, [name])


def test_an_output_that_is_named_twice_is_refused():
    for names in (["blocks.1", "blocks.1"], ["blocks.*", "blocks.1"], ["blocks.1:add", "blocks.1:add"]):
        with pytest.raises(ValueError, match="is named twice"):
            memory.apply(gpt().model, names)
    shared = example(lambda model, x: model.y(model.x(x)), x=(one := nn.Linear(4, 4)), y=one)
    with pytest.raises(ValueError, match="'x' and 'y' are one module"):
        memory.apply(shared.model, ["x", Segment("y", "dear")])
    memory.apply(shared.model, ["x", "y"])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4"]),
        ("blocks.?", ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4"]),
        ("blocks.*.mlp.0", [f"blocks.{index}.mlp.0" for index in range(5)]),
        ("**.attention", [f"blocks.{index}.attention" for index in range(5)]),
        ("*", ["words", "positions", "norm", "head"]),
        ("blocks.*:add", [f"blocks.{index}:add" for index in range(5)]),
    ],
)
def test_globs(pattern, expected):
    built = gpt()
    applied = memory.apply(built.model, [pattern])
    states = applied.experience.cuts.in_order()
    assert [state.until for state in states] == expected
    applied.remove()
    assert_exact(built, [pattern], steps=1)


def test_a_plan_needs_cuts_and_a_module_and_only_one_plan():
    with pytest.raises(TypeError, match=r"write \['blocks.1'\]"):
        memory.apply(gpt().model, "blocks.1")
    with pytest.raises(ValueError, match="at least one output"):
        memory.apply(gpt().model, [])
    with pytest.raises(TypeError, match="takes an nn.Module"):
        memory.apply(lambda x: x, ["a"])
    model = gpt().model
    memory.apply(model, ["blocks.1"])
    with pytest.raises(ValueError, match="has a plan already"):
        memory.apply(model, ["blocks.2"])


@pytest.mark.parametrize("where", ["", "blocks.2"])
def test_models_that_checkpoint_themselves_are_refused(where):
    model = gpt().model
    model.get_submodule(where).gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"gradient_checkpointing is True.*gradient_checkpointing_disable"):
        memory.apply(model, ["blocks.1"])
    model.get_submodule(where).gradient_checkpointing = False
    memory.apply(model, ["blocks.1"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"until": ""}, TypeError),
        ({"until": 3}, TypeError),
        ({"until": "a", "save": "all"}, ValueError),
        ({"until": "a", "home": "disk"}, ValueError),
        ({"until": "a", "dear": "matmul"}, TypeError),
    ],
)
def test_segments_are_checked(arguments, error):
    with pytest.raises(error, match="Segment"):
        Segment(**arguments)


def test_cuts_that_a_forward_does_not_come_to_are_told_of_once():
    built = gpt()
    memory.apply(built.model, ["blocks.1", "blocks.2:sub", "blocks.3*.mlp.*", "blocks.4"])
    with pytest.warns(UserWarning, match="did not come to blocks.2:sub, so it was not cut there"):
        built.model(*built.batch(0))
    built.model(*built.batch(0))


def test_a_plan_none_of_whose_cuts_is_come_to_is_told_of():
    made = example(lambda model, x: model.a(x))
    memory.apply(made.model, ["b"])
    with pytest.warns(UserWarning, match="did not come to b"):
        made.loss(made.model(*made.batch(0))).backward()


# Lists ------------------------------------------------------------------------------------------------------------


def test_outputs_lists_modules_and_operations_in_order_and_leaves_the_model_as_it_was():
    built = resnet()
    before, state = looks(built.model), copy.deepcopy(built.model.state_dict())
    random = torch.get_rng_state()
    found = memory.outputs(built.model, *built.batch(0))
    assert torch.equal(torch.get_rng_state(), random)
    same_looks(looks(built.model), before)
    for name, value in built.model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert len(found) == len(set(found))
    assert found.index("conv1") < found.index("bn1") < found.index("layer1.0") < found.index("fc")
    assert found.index("layer1.0.bn3") < found.index("layer1.0:add") < found.index("layer1.0")
    assert set(built.cuts["operations"]) <= set(found)
    assert ":relu" in found


def test_outputs_works_where_a_forward_fails():
    made = example(lambda model, x: model.a(x) + model.nothing(x))
    before = looks(made.model)
    with pytest.raises(AttributeError):
        memory.outputs(made.model, *made.batch(0))
    same_looks(looks(made.model), before)
    assert torch._C._len_torch_function_stack() == 0


def test_a_plan_says_what_it_does():
    applied = memory.apply(gpt().model, ["blocks.1", Segment("blocks.3", "dear", "host")])
    assert str(applied).splitlines() == [
        "until blocks.1: saves inputs on the device",
        "until blocks.3: saves dear on the host",
    ]


def test_statistics_count_what_was_moved():
    made = example(lambda model, x: model.c(model.b(model.a(x).tanh()).tanh()), 8, 4)
    applied = memory.apply(made.model, ["a", "b", "c"])
    made.loss(made.model(*made.batch(0))).backward()
    assert not any(applied.statistics().values())
    applied.remove()
    applied = memory.apply(made.model, ["a", "b", "c"], home="host")
    for _ in range(2):
        made.loss(made.model(*made.batch(0))).backward()
    found = applied.statistics()
    assert found["bytes_to_host"] == (3 + 2) * 8 * 4 * 4  # the first time all three, then all but the last
    assert found["bytes_to_device"] == found["bytes_to_host"]
    assert found["host_peak"] == 3 * 512
    assert found["host_reserved"] == 16 * 2**20
    assert found["exposed_ms"] == 0


def test_the_order_in_which_cuts_are_named_does_not_matter():
    built = vit()
    assert_exact(built, cycled(built.cuts["blocks"][::-1] + [":add", ":cat"], STATES["mixed"]))


def test_a_part_of_a_model_can_have_a_plan_of_its_own():
    built = MODELS["clip"]()
    memory.apply(built.model.images, ["blocks.0", "blocks.1"], home="host")
    assert_exact_beside(built)
    memory.apply(built.model, ["images", "texts.0", "texts.1"], save="dear")
    assert_exact_beside(built)
    gc.collect()
    assert active_run() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert memory.resident_on("cpu") == (0, 0)


def assert_exact_beside(built):
    plain = copy.deepcopy(built.model)
    for part in (plain, plain.images):
        if memory.applied_to(part) is not None:
            memory.applied_to(part).remove()
    for number in range(3):
        expected = train(plain, built, number)
        assert_equal_outcomes(train(built.model, built, number), expected)


def test_a_parameter_that_is_replaced_between_steps():
    built = gpt()
    plain = copy.deepcopy(built.model)
    memory.apply(built.model, built.cuts["blocks"])
    for number in range(3):
        expected = train(plain, built, number)
        assert_equal_outcomes(train(built.model, built, number), expected)
        for model in (plain, built.model):
            model.norm.weight = nn.Parameter(normal(number, 8))
            model.blocks[1].mlp[0].weight.data = normal(number, 16, 8)


class Untouchable(nn.Linear):
    """As scripted modules are."""

    def register_forward_hook(self, *_, **__):
        raise RuntimeError("no hooks here")


def test_a_plan_that_cannot_be_applied_leaves_nothing():
    made = example(lambda model, x: model.c(model.b(model.a(x))), c=Untouchable(4, 4))
    before = looks(made.model)
    with pytest.raises(RuntimeError, match="no hooks here"):
        memory.apply(made.model, ["a", "b"])
    same_looks(looks(made.model), before)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"hostmem": 3}, TypeError, "no option 'hostmem'; did you mean 'host_memory'"),
        ({"compile": "yes"}, TypeError, "compile must be True or False, got 'yes'"),
        ({"mode": "max-autotune"}, ValueError, "mode are options of torch.compile: set compile = True"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        memory.apply(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0"], **options)


@pytest.mark.parametrize("segments", [None, 5, {"0": 1}, "0"])
def test_segments_must_be_a_list(segments):
    with pytest.raises(TypeError, match="segments must be a list of names or Segments, got"):
        memory.apply(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), segments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": "dear", "dear": ()}, r"must name something, got \(\)"),
        ({"save": "inputs", "dear": ("matmul",)}, "is for save='dear'"),
        ({"home": "host", "lag": 0}, "lag must be a number of segments, 1 or more, got 0"),
        ({"home": "host", "lead": -1}, "lead must be a number of segments, 0 or more, got -1"),
        ({"home": "host", "lead": True}, "lead must be a number of segments"),
    ],
)
def test_states_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        memory.Segment("0", **options)


def test_a_warning_leads_to_whoever_called_the_model():
    class Skips(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    model = Skips(nn.Linear(4, 4), nn.Linear(4, 4))
    memory.apply(model, ["0", "1"])
    with pytest.warns(UserWarning, match="did not come to 1") as told:
        model(torch.randn(2, 4))
    assert told[0].filename == __file__
