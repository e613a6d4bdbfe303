"""What is asked for in a wrong way is refused where it is asked: with the rule, the value and the remedy."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from fleetx import memory
from fleetx.fleet import DistributedStrategy
from fleetx.memory import Segment
from tests.memory.zoo import gpt


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(4, 16)
        self.narrow = nn.Linear(16, 4)

    def forward(self, x):
        return x + self.narrow(self.wide(x).relu())


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


def has_no_hooks(model):
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Segments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dear", [None, 3, {"matmul": 1}, (name for name in ("matmul",)), ("matmul", 3), "matmul"])
def test_dear_is_a_tuple_of_names(dear):
    with pytest.raises(TypeError, match=r"Segment.dear must be a tuple of names, got .*: write \('matmul',\)"):
        Segment("a", "dear", dear=dear)
    assert Segment("a", "dear", dear=["matmul"]).dear == ("matmul",)


@pytest.mark.parametrize("segments", [{"head"}, {"head": 1}, (name for name in ["head"]), nn.Linear(2, 2), b"head", 3])
def test_segments_are_a_list(segments):
    kind = type(segments).__name__
    with pytest.raises(
        TypeError, match=rf"must be a list of names or Segments, got a value of type {kind}: write .*\["
    ):
        memory.apply(Net(), segments)


@pytest.mark.parametrize("one", [3, None, nn.Linear(2, 2), b"head", ["head"]])
def test_what_a_list_holds_is_named_by_its_type(one):
    with pytest.raises(TypeError, match=rf"segments\[1\] is of type {type(one).__name__}: write the name of a module"):
        memory.apply(Net(), ["head", one])


def test_a_module_in_place_of_its_name_is_told_its_name():
    model = Net()
    with pytest.raises(
        TypeError, match=r"segments\[0\] is of type Block: write its name, 'encoder.blocks.1'"
    ) as caught:
        memory.apply(model, [model.encoder.blocks[1]])
    assert "in_features" not in str(caught.value)


@pytest.mark.parametrize(
    ("until", "remedy"), [("head:", "write 'head' for"), (":", "name one"), ("head: ", "head:add")]
)
def test_an_operation_needs_a_name(until, remedy):
    with pytest.raises(ValueError, match=f"nothing follows in '{until}': .*{remedy}"):
        memory.apply(Net(), [until])


@pytest.mark.parametrize("given", [{"lag": 2}, {"lead": 0}, {"lag": 3, "lead": 3}])
def test_lag_and_lead_are_for_the_host(given):
    with pytest.raises(ValueError, match=r"lag and lead are for home='host', got lag=.* set home='host', or leave"):
        Segment("a", **given)
    assert Segment("a", home="host", **given)


def test_a_limit_of_the_host_needs_a_segment_there():
    for segments in (["head"], ["encoder", Segment("head")]):
        with pytest.raises(ValueError, match=r"got '1GiB' and no segment with home='host': set home='host', or leave"):
            memory.apply(Net(), segments, host_memory="1GiB")
    memory.apply(Net(), ["head"], home="host", host_memory="1GiB")
    memory.apply(Net(), ["encoder", Segment("head", home="host")], host_memory="1GiB")
    with pytest.raises(ValueError, match="host_memory"):
        memory.apply(Net(), [Segment("head")], host_memory=2**30)


# Dear modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dear", ["encoder.blocks.0.wide", "encoder.blocks.0", "encoder.blocks.0.*"])
def test_dear_modules_that_are_in_another_segment_are_refused(dear):
    segments = ["encoder.blocks.0", Segment("encoder.blocks.1", "dear", dear=(dear,))]
    model = Net()
    with pytest.raises(
        ValueError, match=r"not inside the one that ends at 'encoder.blocks.1'.*\(near: encoder.blocks.1"
    ):
        memory.apply(model, segments)
    assert has_no_hooks(model)


@pytest.mark.parametrize("dear", ["encoder.blocks.0.wide", "encoder", "**.wide", "encoder.blocks.2"])
def test_dear_modules_that_may_be_in_the_segment_are_taken(dear):
    model = Net()
    memory.apply(model, [Segment("encoder.blocks.2", "dear", dear=(dear,))])
    model(torch.randn(2, 4)).sum().backward()


def test_a_dear_module_by_another_name_of_it_is_taken():
    model = Net()
    model.encoder.blocks[1].wide = model.encoder.blocks[0].wide
    memory.apply(model, ["encoder.blocks.0", Segment("encoder.blocks.1", "dear", dear=("encoder.blocks.0.wide",))])


def test_a_glob_of_segments_may_have_dear_modules_in_one_of_them():
    memory.apply(Net(), [Segment("encoder.blocks.*", "dear", dear=("encoder.blocks.1.wide",))])


def test_dear_modules_that_are_never_called_are_refused():
    with pytest.raises(ValueError, match=r"'encoder.blocks', a ModuleList, which is never called.*'encoder.blocks.\*'"):
        memory.apply(Net(), [Segment("encoder", "dear", dear=("encoder.blocks",))])


def test_kinds_and_modules_mean_these_kinds_in_these_modules():
    saved = {}
    for dear in [("matmul",), ("matmul", "**.narrow"), ("convolution", "**.narrow")]:
        model = Net()
        memory.apply(model, [Segment("encoder", "dear", dear=dear)])
        out = model(torch.randn(64, 4))
        saved[dear] = memory.resident_on("cpu").checkpoints
        del out
    every, narrow, none = saved.values()
    assert every - none == 3 * 64 * (16 + 4) * 4
    assert narrow - none == 3 * 64 * 4 * 4


# Compiled by others -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["head", "_orig_mod.head"])
def test_a_compiled_model_is_refused_at_once(name):
    model = torch.compile(Net(), backend="eager")
    with pytest.raises(ValueError, match=r"this one \(the result of torch.compile\) is, .*compile=True\)"):
        memory.apply(model, [name])


@pytest.mark.middle
def test_the_compiler_is_not_imported_to_look_for_it():
    code = (
        "import sys; from torch import nn; from fleetx import memory;"
        "memory.apply(nn.Sequential(nn.Linear(2, 2)), ['0']); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Two plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [["encoder"], ["encoder.blocks.0"], ["head"], ["encoder:add"]])
def test_a_part_of_a_model_with_a_plan_gets_none_of_its_own(outer):
    model = Net()
    applied = memory.apply(model, outer)
    with pytest.raises(ValueError, match=r"a model around this one has a plan already.*remove\(\) the first"):
        memory.apply(model.encoder, ["blocks.1"])
    applied.remove()
    assert has_no_hooks(model)
    memory.apply(model.encoder, ["blocks.1"])


@pytest.mark.parametrize("outer", [["encoder.blocks.0"], ["encoder.blocks.1:add"], ["encoder.blocks.*", "head"]])
def test_a_model_is_not_cut_inside_a_part_with_a_plan(outer):
    model = Net()
    applied = memory.apply(model.encoder, ["blocks.1"])
    with pytest.raises(ValueError, match=r"'encoder' has a plan.*applied_to\(model.encoder\).remove\(\), and name its"):
        memory.apply(model, outer)
    assert memory.applied_to(model) is None
    applied.remove()
    memory.apply(model, outer)


def test_a_plan_deep_inside_of_what_runs_as_a_whole_is_refused():
    model = Net()
    memory.apply(model.encoder.blocks[0], ["wide"])
    with pytest.raises(ValueError, match=r"'encoder.blocks.0' has a plan already, and this one would not run it as a"):
        memory.apply(model, ["encoder"])
    memory.apply(model, ["encoder.blocks.*"])  # here it does


# Elsewhere --------------------------------------------------------------------------------------------------------


def test_resident_on_takes_devices_only():
    built = gpt()
    memory.apply(built.model, built.cuts["blocks"])
    out = built.model(*built.batch(0))
    assert memory.resident_on("cpu") == memory.resident_on(torch.device("cpu"))
    assert memory.resident_on("cpu").checkpoints > 0
    with pytest.raises(RuntimeError, match="nonsense"):
        memory.resident_on("nonsense")
    for value in (None, 0, out):
        with pytest.raises(TypeError, match=r"takes a torch.device or its name, got .*: write for example 'cuda:0'"):
            memory.resident_on(value)


@pytest.mark.parametrize("value", ["x", 3, None])
def test_a_shape_is_a_list_of_numbers(value):
    with pytest.raises(TypeError, match=r"checkpoint_shape must be a list.*; write a list such as \[1\]"):
        DistributedStrategy(recompute_configs={"checkpoint_shape": value})
    DistributedStrategy(recompute_configs={"checkpoint_shape": [1]})
