import logging
import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetx import notices
from fleetx.names import KINDS, ParameterInfo
from fleetx.optim import exclusion
from fleetx.optim.exclusion import ExclusionRow


def exclude(patterns, parameters, **more):
    return exclusion.exclude(patterns, parameters, known_kinds=KINDS, **more)


def known(name, *kinds):
    return ParameterInfo(name, frozenset(kinds), kinds_known=True)


RESNET = [
    known("conv1.weight"),
    known("bn1.weight", "norm", "batch_norm"),
    known("bn1.bias", "bias", "norm", "batch_norm"),
    known("layer1.0.conv1.weight"),
    known("fc.weight"),
    known("fc.bias", "bias"),
]


def test_a_kind_takes_its_parameters_whatever_they_are_called():
    assert exclude(["batch_norm"], RESNET).mask == (False, True, True, False, False, False)


def test_fleets_alias_means_bias():
    assert exclude([".b_0"], RESNET).mask == exclude(["bias"], RESNET).mask
    assert exclude([".b_0"], [ParameterInfo("fc_0.w_0"), ParameterInfo("fc_0.b_0")]).mask == (False, True)


def test_a_plain_pattern_is_a_part_of_the_name():
    assert exclude(["fc"], RESNET).mask == (False, False, False, False, True, True)
    assert exclude(["0.conv"], RESNET).mask == (False, False, False, True, False, False)


def test_a_glob_is_over_the_whole_name():
    assert exclude(["conv1.*"], RESNET).mask == (True, False, False, False, False, False)
    assert exclude(["*conv1.*"], RESNET).mask == (True, False, False, True, False, False)
    assert exclude(["bn[0-9].weigh?"], RESNET).mask == (False, True, False, False, False, False)


def test_rows_count_and_show_examples():
    decided = exclude(["norm", "layer_norm", "*"], RESNET)
    assert decided.rows(examples=2) == [
        ExclusionRow("norm", 2, ("bn1.weight", "bn1.bias")),
        ExclusionRow("layer_norm", 0, ()),
        ExclusionRow("*", 6, ("conv1.weight", "bn1.weight")),
    ]


def test_no_patterns_need_no_names():
    assert exclude([], [None, None]).mask == (False, False)


def test_a_kind_the_model_does_not_have_counts_nothing():
    assert exclude(["rms_norm", ".b_0"], [known("fc.weight")]).rows() == [("rms_norm", 0, ()), (".b_0", 0, ())]
    assert exclude(["rms_norm"], []).mask == ()


def test_a_kind_that_is_only_a_name_where_kinds_are_unknown():
    parameters = [ParameterInfo("fc_0.w_0"), ParameterInfo("batch_norm_0.w_0")]
    assert exclude(["batch_norm"], parameters).mask == (False, True)
    with pytest.raises(ValueError, match=r"'layer_norm' is a kind .* no kind is known: .*names\.record\(model\)"):
        exclude(["layer_norm"], parameters)
    with pytest.raises(ValueError, match=r"'\.b_0' is a kind .*fleet\.distributed_model"):
        exclude([".b_0"], parameters)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("batchnorm", "bn1"),
        ("layer2.0.conv1", "layer1.0.conv1.weight"),
        ("fc.wieght", "fc.weight"),
        ("*.wieght", ".weight"),
    ],
)
def test_a_pattern_that_takes_nothing_shows_the_nearest_names_and_the_kinds(wrong, nearest):
    with pytest.raises(ValueError) as error:
        exclude([wrong], RESNET, setting="exclude_from_adaptation")
    message = str(error.value)
    assert message.startswith(f"exclude_from_adaptation: {wrong!r} matches no parameter")
    assert re.search(rf"nearest names are: [^:]*{re.escape(nearest)}", message)
    assert "instance_norm" in message
    assert message.endswith("Correct the pattern or remove it.")


@pytest.mark.parametrize(
    ("wrong", "kind"), [("batchnorm", "batch_norm"), ("LayerNorm", "layer_norm"), ("BatchNorm2d", "batch_norm")]
)
def test_a_pattern_that_is_nearly_a_kind_shows_the_kind(wrong, kind):
    with pytest.raises(
        ValueError, match=rf"{wrong}' matches no .*Did you mean the kind '{kind}'\? Correct the pattern"
    ):
        exclude([wrong], RESNET)


def test_a_kind_of_norm_that_takes_nothing_is_told_of_where_other_norms_are_left(caplog, monkeypatch):
    monkeypatch.setattr(notices, "_told", set())
    caplog.set_level(logging.WARNING, "fleetx")
    exclude(["layer_norm", "batch_norm", "bias"], RESNET)  # one list for many models
    exclude(["layer_norm"], [known("fc.weight")])
    exclude(["norm"], [known("fc.weight")])
    assert caplog.messages == []
    for _ in range(2):
        exclude(["layer_norm", "bias"], RESNET)
    (message,) = caplog.messages
    assert message == (
        "exclude_from_weight_decay: 'layer_norm' takes nothing here, while the norm bn1.weight is batch_norm, and is "
        "not excluded: 'norm' takes norms of every kind."
    )


def test_the_nearest_name_comes_first():
    with pytest.raises(ValueError, match=r"nearest names are: fc\.weight, "):
        exclude(["fc.wieght"], RESNET)


def test_parameters_without_names():
    with pytest.raises(ValueError, match=r"\['bias'\] speaks of names, and 1 of 2 .*model\.named_parameters\(\)"):
        exclude(["bias"], [known("fc.bias", "bias"), None])


def test_patterns_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"must be a list of patterns, got 'bias': write it as \[\"bias\""):
        exclude("bias", RESNET)
    with pytest.raises(TypeError, match="must be a list of patterns, got None"):
        exclude(None, RESNET)
    with pytest.raises(TypeError, match="must hold strings, got 3: write a name"):
        exclude([3], RESNET)
    with pytest.raises(ValueError, match='empty pattern, which every name contains: write "\\*"'):
        exclude([""], RESNET)


part = st.text("ab_01", min_size=1, max_size=3)
kinds = st.frozensets(st.sampled_from(KINDS), max_size=3)
infos = st.builds(ParameterInfo, st.lists(part, min_size=1, max_size=3).map(".".join), kinds, kinds_known=st.just(True))
parameter_lists = st.lists(infos, max_size=6)
pattern_lists = st.lists(st.sampled_from([*KINDS, ".b_0", "a", "b_", "0", "a*", "*.b*", "[ab]?", "*"]), max_size=4)


def expected(pattern, parameter):
    if pattern == ".b_0":  # a kind, and no part of a name, where kinds are known
        return "bias" in parameter.kinds
    if set(pattern) & set("*?["):
        return fnmatchcase(parameter.name, pattern)
    return pattern in parameter.kinds or pattern in parameter.name


@given(pattern_lists, parameter_lists)
@example([".b_0"], [ParameterInfo("0.b_0", frozenset(), kinds_known=True)])
def test_the_mask_is_the_rule(patterns, parameters):
    missed = [p for p in patterns if p not in (*KINDS, ".b_0", "*") and not any(expected(p, x) for x in parameters)]
    if missed:
        with pytest.raises(ValueError, match=re.escape(repr(missed[0]))):
            exclude(patterns, parameters)
        return
    decided = exclude(patterns, parameters)
    assert decided.mask == tuple(any(expected(p, x) for p in patterns) for x in parameters)
    assert {p: list(took) for p, took in decided.taken.items()} == {
        p: [x.name for x in parameters if expected(p, x)] for p in patterns
    }
    assert [row.pattern for row in decided.rows()] == list(dict.fromkeys(patterns))


@given(parameter_lists, st.randoms())
def test_the_order_of_parameters_and_patterns_changes_nothing(parameters, random):
    patterns = ["bias", "norm", "embedding"]
    shuffled = random.sample(range(len(parameters)), len(parameters))
    mask = exclude(patterns, parameters).mask
    again = exclude(patterns[::-1], [parameters[i] for i in shuffled]).mask
    assert again == tuple(mask[i] for i in shuffled)
