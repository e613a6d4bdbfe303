import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fleetx import names


def kinds_by_name(model):
    names.record(model)
    return {name: set(names.info(p).kinds) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.BatchNorm1d(4), "batch_norm"),
        (nn.BatchNorm3d(4), "batch_norm"),
        (nn.SyncBatchNorm(4), "batch_norm"),
        (nn.LayerNorm(4), "layer_norm"),
        (nn.GroupNorm(2, 4), "group_norm"),
        (nn.InstanceNorm2d(4, affine=True), "instance_norm"),
    ],
)
def test_torch_norms(module, kind):
    assert kinds_by_name(nn.ModuleDict({"x": module})) == {
        "x.weight": {"norm", kind},
        "x.bias": {"bias", "norm", kind},
    }


def test_rms_norm_embedding_linear_and_conv():
    model = nn.ModuleDict(
        {
            "rms": nn.RMSNorm(4),
            "words": nn.Embedding(5, 4),
            "bag": nn.EmbeddingBag(5, 4),
            "fc": nn.Linear(4, 4),
            "conv": nn.Conv2d(3, 3, 1),
        }
    )
    assert kinds_by_name(model) == {
        "rms.weight": {"norm", "rms_norm"},
        "words.weight": {"embedding"},
        "bag.weight": {"embedding"},
        "fc.weight": set(),
        "fc.bias": {"bias"},
        "conv.weight": set(),
        "conv.bias": {"bias"},
    }


def custom(class_name, base=nn.Module, **attributes):
    module = type(class_name, (base,), {})(**attributes)
    module.weight = nn.Parameter(torch.ones(3))
    return module


@pytest.mark.parametrize(
    ("class_name", "kinds"),
    [
        ("LlamaRMSNorm", {"norm", "rms_norm"}),
        ("T5LayerNorm", {"norm", "layer_norm"}),
        ("LayerNorm2d", {"norm", "layer_norm"}),
        ("LayerNormFp32", {"norm", "layer_norm"}),
        ("FrozenBatchNorm2d", {"norm", "batch_norm"}),
        ("BatchNormAct2d", {"norm", "batch_norm"}),
        ("GroupNorm32", {"norm", "group_norm"}),
        ("Adaptive_Instance_Norm", {"norm", "instance_norm"}),
        ("RMSNormGated", {"norm", "rms_norm"}),
        ("L2Norm", {"norm"}),
        ("VocabParallelEmbedding", {"embedding"}),
        ("LayerNormLSTMCell", set()),
        ("LinearWeightNorm", set()),
        ("NormalHead", set()),
    ],
)
def test_classes_of_other_libraries_by_name(class_name, kinds):
    assert kinds_by_name(custom(class_name)) == {"weight": kinds}


def test_a_subclass_is_what_its_base_is():
    assert kinds_by_name(type("Scale", (nn.LayerNorm,), {})(3))["weight"] == {"norm", "layer_norm"}


def test_a_container_named_like_a_norm_gives_its_children_nothing():
    block = type("BlockWithLayerNorm", (nn.Sequential,), {})(nn.Linear(2, 2))
    assert kinds_by_name(block) == {"0.weight": set(), "0.bias": {"bias"}}


def test_biases_of_attention_and_lstm():
    attention = kinds_by_name(nn.MultiheadAttention(4, 2, add_bias_kv=True))
    assert {name for name, kinds in attention.items() if "bias" in kinds} == {
        "in_proj_bias",
        "bias_k",
        "bias_v",
        "out_proj.bias",
    }
    lstm = kinds_by_name(nn.LSTM(2, 3))
    assert {name for name, kinds in lstm.items() if kinds == {"bias"}} == {"bias_ih_l0", "bias_hh_l0"}


def test_a_name_that_merely_speaks_of_bias_is_none():
    model = nn.ModuleDict({"relative_bias": nn.Linear(2, 2, bias=False)})
    model.register_parameter("position_bias_table", nn.Parameter(torch.ones(2)))
    assert kinds_by_name(model) == {"position_bias_table": set(), "relative_bias.weight": set()}


def test_parametrized_modules_keep_their_kinds():
    model = nn.ModuleDict({"fc": parametrizations.weight_norm(nn.Linear(2, 2)), "ln": nn.LayerNorm(2)})
    nn.utils.parametrize.register_parametrization(model["ln"], "bias", nn.Identity())
    kinds = kinds_by_name(model)
    assert kinds["fc.parametrizations.weight.original0"] == set()
    assert kinds["fc.bias"] == {"bias"}
    assert kinds["ln.parametrizations.bias.original"] == {"bias", "norm", "layer_norm"}
    bare = nn.utils.parametrize.register_parametrization(nn.LayerNorm(2), "bias", nn.Identity())
    assert kinds_by_name(bare)["parametrizations.bias.original"] == {"bias", "norm", "layer_norm"}


def test_a_shared_parameter_has_its_first_name_and_all_kinds():
    model = nn.ModuleDict({"head": nn.Linear(4, 5), "words": nn.Embedding(5, 4)})
    model["words"].weight = model["head"].weight
    names.record(model)
    assert names.info(model["words"].weight) == names.ParameterInfo("head.weight", frozenset({"embedding"}), True)


def test_a_module_under_two_names_has_the_first():
    norm = nn.LayerNorm(2)
    names.record(nn.ModuleDict({"a": norm, "b": norm}))
    assert names.info(norm.weight).name == "a.weight"


def test_unknown_parameters_and_later_records():
    layer = nn.Linear(2, 2)
    assert names.info(layer.weight) is None
    names.record(layer)
    assert names.info(layer.weight).name == "weight"
    names.record(nn.Sequential(layer))
    assert names.info(layer.weight).name == "0.weight"
    assert names.info(torch.ones(2)) is None


def test_names_are_those_of_named_parameters():
    model = nn.Transformer(4, 2, 1, 1, 4, batch_first=True)
    names.record(model)
    assert all(names.info(p).name == name and names.info(p).kinds_known for name, p in model.named_parameters())


def test_the_registry_keeps_no_model_alive():
    before = len(names._registry)
    layer = nn.Linear(2, 2)
    names.record(layer)
    assert len(names._registry) == before + 2
    del layer
    gc.collect()
    assert len(names._registry) <= before


def test_every_kind_given_is_a_known_one():
    for module in (nn.BatchNorm1d(2), nn.InstanceNorm1d(2, affine=True), nn.RMSNorm(2), nn.Embedding(2, 2)):
        for kinds in kinds_by_name(module).values():
            assert kinds <= set(names.KINDS)
