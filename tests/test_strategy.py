import copy
import datetime
import enum
import logging
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fleetx.strategy
from fleetx import notices
from fleetx.settings import Bool, ByteSize, Choice, Float, Int, ListOf, OrNone, Section, Text
from fleetx.strategy import UNBUILT, BuildStrategy, Checkpoints, DistributedStrategy, ExecutionStrategy

SWITCHES = ["amp", "recompute", "gradient_merge", "lars", "lamb", "localsgd", "dgc", "sharding"]
ALONE = ["use_hierarchical_allreduce", "fp16_allreduce", "bf16_allreduce", "find_unused_parameters"]
LOSS_SCALE = {"init_loss_scaling": 32768.0, "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 2}
RATIOS = {"incr_ratio": 2.0, "decr_ratio": 0.8, "use_dynamic_loss_scaling": True}
PRECISION = {"use_pure_fp16": False, "use_pure_bf16": False, "dtype": "float16"}
RECOMPUTE = {
    "checkpoints": [],
    "enable_offload": False,
    "checkpoint_shape": [],
    "memory_budget": None,
    "global_batch": None,
    "oom_retry": False,
}
LARS = {"lars_coeff": 0.001, "lars_weight_decay": 0.0005, "epsilon": 0.0}
LAYERWISE = {
    "exclude_from_weight_decay": [],
    **dict.fromkeys(["exclude_from_adaptation", "excluded_lr", "zero_norm_lr", "fused", "trust_ratios_every"]),
    "form": "fleet",
}
SEGMENTS = {"sharding_segment_strategy": "segment_broadcast_MB", "segment_broadcast_MB": 32.0}
DEGREES = {"sharding_degree": 8, "dp_degree": 1, "mp_degree": 1, "gradient_merge_acc_step": 1}
DEFAULTS = {
    **dict.fromkeys([*SWITCHES, *ALONE, "sync_batch_norm", "compile"], False),
    "amp_configs": LOSS_SCALE | RATIOS | PRECISION | {"custom_white_list": [], "custom_black_list": []},
    "recompute_configs": RECOMPUTE,
    "gradient_merge_configs": {"k_steps": 1, "avg": True},
    "lars_configs": LARS | LAYERWISE | {"lr_in_momentum": None},
    "lamb_configs": {"lamb_weight_decay": 0.01, "always_adapt": False, "bias_correction": True} | LAYERWISE,
    "localsgd_configs": {"k_steps": 1, "begin_step": 1},
    "dgc_configs": {"rampup_begin_step": 0, "rampup_step": 1, "sparsity": [0.999]},
    "sharding_configs": SEGMENTS | DEGREES | {"segment_anchors": [], "optimize_offload": False},
    "fuse_all_reduce_ops": True,
    "fuse_grad_size_in_MB": 32,
    "last_comm_group_size_MB": 1.0,
    "nccl_comm_num": 1,
    "hierarchical_allreduce_inter_nranks": 1,
}
OUT_OF_RANGE = {
    "amp_configs.init_loss_scaling": [0.5, -1],
    "amp_configs.incr_every_n_steps": [0],
    "amp_configs.decr_every_n_nan_or_inf": [0],
    "amp_configs.incr_ratio": [1, 0.5],
    "amp_configs.decr_ratio": [0, 1.0, 2.0],
    "amp_configs.dtype": ["float32"],
    "recompute_configs.checkpoint_shape": [[0]],
    "recompute_configs.memory_budget": [0, "30G"],
    "recompute_configs.global_batch": [0, -1],
    "gradient_merge_configs.k_steps": [0, -3],
    "lars_configs.lars_coeff": [0],
    "lars_configs.lars_weight_decay": [-1e-9],
    "lars_configs.epsilon": [-1],
    "lars_configs.form": ["nvlamb"],
    "lars_configs.excluded_lr": [-1],
    "lamb_configs.lamb_weight_decay": [-0.1],
    "lamb_configs.trust_ratios_every": [0],
    "localsgd_configs.k_steps": [0],
    "localsgd_configs.begin_step": [0],
    "dgc_configs.rampup_begin_step": [-1],
    "dgc_configs.rampup_step": [0],
    "dgc_configs.sparsity": [[1.0], [-0.1]],
    "sharding_configs.sharding_segment_strategy": ["x"],
    "sharding_configs.segment_broadcast_MB": [0],
    "sharding_configs.sharding_degree": [0],
    "fuse_grad_size_in_MB": [0],
    "last_comm_group_size_MB": [0],
    "nccl_comm_num": [0],
    "hierarchical_allreduce_inter_nranks": [0],
}


@pytest.fixture(autouse=True)
def _nothing_told_yet(monkeypatch):
    monkeypatch.setattr(notices, "_told", set())


def problems_of(check):
    """The problems that a check reports, one by one."""
    with pytest.raises((ValueError, TypeError)) as caught:
        check()
    first, *rest = str(caught.value).split("\n  - ")
    return rest or [first.removeprefix("the strategy: ")]


# What is asked for


def test_every_setting_and_its_default():
    assert DistributedStrategy().to_dict() == DEFAULTS


@pytest.mark.parametrize(("path", "value"), [(path, v) for path, wrong in OUT_OF_RANGE.items() for v in wrong])
def test_ranges(path, value):
    section, _, name = path.rpartition(".")
    asked = {section: {name: value}} if section else {name: value}
    with pytest.raises(ValueError, match=rf"^{path}(\[0\])? must be .*, got .*; "):
        DistributedStrategy(**asked)


def test_fuse_grad_size_is_whole():
    with pytest.raises(TypeError, match=r"must be an int >= 1, got 32\.5 \(float\); write a whole number such as 32"):
        DistributedStrategy(fuse_grad_size_in_MB=32.5)


def test_amp_1_is_an_error_and_not_a_silent_false():
    strategy = DistributedStrategy()
    with pytest.raises(TypeError, match=r"^amp must be True or False, got 1 \(int\); write True$"):
        strategy.amp = 1
    assert strategy.amp is False


def test_misspelled_names():
    strategy = DistributedStrategy()
    with pytest.raises(
        AttributeError,
        match="DistributedStrategy has no setting 'gradient_merg'; did you mean 'gradient_merge'",
    ):
        strategy.gradient_merg = True
    with pytest.raises(AttributeError, match=r"did you mean 'recompute_configs'\?"):
        _ = strategy.recompute_config
    with pytest.raises(ValueError, match=r"lars_configs has no setting 'lars_coef'; did you mean 'lars_coeff'\?"):
        strategy.lars_configs = {"lars_coef": 0.1}


def test_the_constructor_reports_all_mistakes_at_once():
    with pytest.raises(ValueError) as caught:
        DistributedStrategy(amp=1, lasr=True, gradient_merge_configs={"k_steps": 0, "average": True}, lars_configs=3)
    assert str(caught.value).splitlines() == [
        "these settings: 5 problems",
        "  - amp must be True or False, got 1 (int); write True",
        "  - DistributedStrategy has no setting 'lasr'; did you mean 'lars'?",
        "  - gradient_merge_configs.k_steps must be an int >= 1, got 0; write 1 or more, and less than 2**63",
        "  - gradient_merge_configs has no setting 'average'; did you mean 'avg'?",
        '  - lars_configs must be a dict, got 3 (int); write {"name": value}',
    ]


def test_a_dict_keeps_the_other_keys_and_a_list_is_replaced():
    strategy = DistributedStrategy(lars_configs={"lars_coeff": 0.02, "exclude_from_weight_decay": ["bias", "norm"]})
    strategy.lars_configs = {"exclude_from_weight_decay": ["batch_norm"]}
    assert strategy.lars_configs.lars_coeff == 0.02
    assert strategy.lars_configs["exclude_from_weight_decay"] == ["batch_norm"]


@pytest.mark.parametrize("value", ["auto", [], ["layer1", "layer2.*"]])
def test_checkpoints(value):
    assert DistributedStrategy(recompute_configs={"checkpoints": value}).recompute_configs.checkpoints == value


def test_auto_is_written_as_it_is():
    with pytest.raises(TypeError, match="got 'Auto' \\(str\\); write \"auto\""):
        DistributedStrategy(recompute_configs={"checkpoints": "Auto"})


@pytest.mark.parametrize("value", ["layer1", ""])
def test_checkpoints_are_no_bare_name(value):
    with pytest.raises(TypeError) as caught:
        DistributedStrategy(recompute_configs={"checkpoints": value})
    assert str(caught.value) == (
        f'recompute_configs.checkpoints must be a list of names or globs, or "auto", got {value!r} (str); '
        f"write a list such as [{value!r}]"
    )


# What goes together


def test_a_new_strategy_is_fine():
    DistributedStrategy().check()
    DistributedStrategy().check_runnable()


def test_configs_of_what_is_off_are_left_alone():
    DistributedStrategy(
        amp_configs={
            "use_pure_fp16": True,
            "use_pure_bf16": True,
            "custom_white_list": ["a"],
            "custom_black_list": ["a"],
        },
        recompute_configs={"memory_budget": "30GiB", "enable_offload": True},
        dgc_configs={"sparsity": []},
        sharding_configs={"sharding_segment_strategy": "segment_anchors"},
        hierarchical_allreduce_inter_nranks=8,
    ).check_runnable()


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"lars": True, "lamb": True}, "lars and lamb must not both be on"),
        (
            {"fp16_allreduce": True, "bf16_allreduce": True},
            "fp16_allreduce and bf16_allreduce must not both be on",
        ),
        ({"recompute": True}, "recompute_configs.checkpoints must say where the model is cut"),
        (
            {"recompute": True, "recompute_configs": {"checkpoints": ["a"], "memory_budget": "30GiB"}},
            "recompute_configs.memory_budget must only be set with checkpoints = \"auto\", got '30GiB'",
        ),
        (
            {"recompute": True, "recompute_configs": {"checkpoints": ["a"], "oom_retry": True}},
            'recompute_configs.oom_retry must only be set with checkpoints = "auto", got True; set',
        ),
        (
            {
                "recompute": True,
                "recompute_configs": {"checkpoints": "auto", "global_batch": 64},
                "gradient_merge": True,
            },
            "recompute_configs.global_batch lets the planner cut batches, and must not be set while gradient_merge",
        ),
        (
            {"amp": True, "amp_configs": {"use_pure_fp16": True, "use_pure_bf16": True}},
            "amp_configs must not set use_pure_fp16 and use_pure_bf16",
        ),
        (
            {"amp": True, "amp_configs": {"custom_white_list": ["a", "b"], "custom_black_list": ["b"]}},
            "amp_configs.custom_white_list and custom_black_list must not overlap, got ['b'] in both",
        ),
        ({"dgc": True, "dgc_configs": {"sparsity": []}}, "dgc_configs.sparsity must not be empty"),
        (
            {"sharding": True, "sharding_configs": {"sharding_segment_strategy": "segment_anchors"}},
            "sharding_configs.segment_anchors must name modules",
        ),
        (
            {"build_strategy": {"sync_batch_norm": True}},
            "build_strategy.sync_batch_norm must not be on alone",
        ),
    ],
)
def test_contradictions(asked, problem):
    strategy = DistributedStrategy(**asked)
    (found,) = problems_of(strategy.check)
    assert found.startswith(problem)
    assert "; " in found  # and a remedy


def test_auto_with_a_budget_is_fine():
    configs = {"checkpoints": "auto", "memory_budget": "30GiB"}
    DistributedStrategy(recompute=True, recompute_configs=configs).check()


@pytest.mark.parametrize(("pure", "dtype"), [("use_pure_fp16", "float16"), ("use_pure_bf16", "bfloat16")])
def test_a_pure_mode_decides_the_dtype_that_nobody_set(pure, dtype):
    other = {"float16": "bfloat16", "bfloat16": "float16"}[dtype]
    strategy = DistributedStrategy(amp=True, amp_configs={pure: True, "custom_black_list": ["head"]})
    strategy.check()
    assert strategy.amp_configs.dtype == dtype
    strategy.amp_configs.dtype = dtype
    strategy.check()
    strategy.amp_configs.dtype = other
    (found,) = problems_of(strategy.check)
    assert found == f"amp_configs.dtype must be '{dtype}' with {pure}, got '{other}'; set that, or {pure} = False"
    for same in (strategy.copy(), DistributedStrategy.from_toml(strategy.to_toml())):
        assert problems_of(same.check) == [found]


def test_a_pure_mode_that_was_taken_back_leaves_the_default():
    strategy = DistributedStrategy(amp_configs={"use_pure_bf16": True})
    strategy = strategy.copy()
    strategy.amp_configs.use_pure_bf16 = False
    assert strategy.amp_configs.dtype == "float16"
    assert strategy == DistributedStrategy()


def test_check_reports_everything_at_once_and_what_was_changed_in_place():
    strategy = DistributedStrategy(lars=True, lamb=True, recompute=True, amp=True)
    strategy.amp_configs.custom_white_list.append(["not", "a", "name"])
    strategy.amp_configs.custom_black_list.extend(["", ["not", "a", "name"]])
    found = problems_of(strategy.check)
    assert [problem.partition(" must")[0] for problem in found] == [
        "amp_configs.custom_white_list[0]",
        "amp_configs.custom_black_list[0]",
        "amp_configs.custom_black_list[1]",
        "lars and lamb",
        "amp_configs.custom_white_list and custom_black_list",
        "recompute_configs.checkpoints",
    ]


def test_what_is_not_built_cannot_run_but_can_be_checked():
    assert set(UNBUILT) <= set(DEFAULTS)
    strategy = DistributedStrategy(**dict.fromkeys(UNBUILT, True), recompute_configs={"checkpoints": "auto"})
    strategy.check()
    assert problems_of(strategy.check_runnable) == [
        f"{name} ({feature}) is not supported yet, got True; set {name} = False" for name, feature in UNBUILT.items()
    ]


def test_check_runnable_reports_contradictions_too(monkeypatch):
    monkeypatch.setattr(fleetx.strategy, "UNBUILT", {"compile": "compiling"})
    strategy = DistributedStrategy(lars=True, lamb=True, compile=True, recompute=True)
    assert [problem.split()[0] for problem in problems_of(strategy.check_runnable)] == [
        "lars",
        "recompute_configs.checkpoints",
        "compile",
    ]


# Fleet's executor


def test_executor_settings_say_once_that_they_do_nothing(caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with caplog.at_level(logging.WARNING, "fleetx"):
        execution, build = ExecutionStrategy(), BuildStrategy()
        execution.num_threads = 2
        execution.num_iteration_per_drop_scope = 1
        build.enable_inplace = True
        assert caplog.messages == []
        strategy = DistributedStrategy()
        strategy.execution_strategy = execution
        DistributedStrategy().execution_strategy = execution
        strategy.build_strategy = build
        strategy.build_strategy.fuse_bn_act_ops = True
        strategy.copy()
    assert caplog.messages == [
        "execution_strategy has no effect on PyTorch; it may be left out of the script",
        "build_strategy has no effect on PyTorch; it may be left out of the script",
    ]
    execution.num_threads = 9
    assert strategy.execution_strategy.num_threads == 2
    assert DistributedStrategy.from_toml(strategy.to_toml()) == strategy
    assert "execution_strategy" not in str(strategy)


def test_executor_settings_are_checked_all_the_same():
    with pytest.raises(
        AttributeError, match=r"ExecutionStrategy has no setting 'num_thread'; did you mean 'num_threads'"
    ):
        ExecutionStrategy().num_thread = 1
    with pytest.raises(ValueError, match="num_threads must be an int >= 1"):
        ExecutionStrategy(num_threads=0)
    with pytest.raises(TypeError, match="execution_strategy must be a dict"):
        DistributedStrategy().execution_strategy = 4
    with pytest.raises(ValueError, match="execution_strategy has no setting"):
        DistributedStrategy().execution_strategy = BuildStrategy()


# Kept, copied, printed


def test_a_used_strategy_says_who_uses_it():
    strategy = DistributedStrategy(amp=True)
    strategy.freeze("distributed_model(ResNet)")
    for change in (
        lambda: setattr(strategy, "amp", False),
        lambda: setattr(strategy, "amp_configs", {"decr_ratio": 0.5}),
        lambda: setattr(strategy.amp_configs, "decr_ratio", 0.5),
        lambda: strategy.recompute_configs.checkpoints.append("layer1"),
        lambda: setattr(strategy.build_strategy, "enable_inplace", True),
    ):
        with pytest.raises(TypeError, match=r"is in use by distributed_model\(ResNet\); .*strategy\.copy\(\)"):
            change()
    strategy.check()
    assert DistributedStrategy.from_toml(strategy.to_toml()) == strategy
    for other in (strategy.copy(), copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other == strategy
        other.amp = False
        assert other != strategy


def test_repr_can_be_evaluated():
    assert repr(DistributedStrategy()) == "DistributedStrategy()"
    strategy = DistributedStrategy(lars=True, lars_configs={"exclude_from_weight_decay": ["bias"]}, nccl_comm_num=2)
    assert eval(repr(strategy)) == strategy


# Written down and read back


def values_of(setting):
    """Values that a setting accepts."""
    match setting:
        case Section():
            return st.fixed_dictionaries({}, optional={k: values_of(v) for k, v in setting.kind._declared.items()})
        case Bool():
            return st.booleans()
        case Int():
            return st.integers(setting.at_least, 2**63 - 1)
        case Float():
            lowest = max(setting.at_least, setting.above)
            above = setting.above == lowest
            return st.floats(lowest, setting.below, exclude_min=above, exclude_max=True, allow_nan=False)
        case Text():
            printable = st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" \"'\\#[]=")
            return st.text(printable, min_size=1, max_size=8).filter(str.strip)
        case Choice():
            return st.sampled_from(setting.options)
        case ByteSize():
            return st.integers(1, 2**63 - 1) | st.sampled_from(["30GiB", "1.5 gb", " 2TiB"])
        case Checkpoints():
            return st.just("auto") | values_of(setting._names)
        case ListOf():
            return st.lists(values_of(setting.item), max_size=3)
        case OrNone():
            return st.none() | values_of(setting.kind)
    raise AssertionError(setting)


STRATEGIES = values_of(Section(DistributedStrategy)).map(DistributedStrategy.from_dict)


@given(STRATEGIES)
@settings(max_examples=60)
def test_every_round_trip_is_exact(strategy):
    assert DistributedStrategy.from_dict(strategy.to_dict()) == strategy
    read = DistributedStrategy.from_toml(strategy.to_toml())
    assert read == strategy
    assert repr(read) == repr(strategy)
    assert read.to_toml() == strategy.to_toml()
    assert pickle.loads(pickle.dumps(strategy)) == copy.deepcopy(strategy) == strategy.copy() == strategy
    assert eval(repr(strategy)) == strategy
    assert len({len(line) for line in str(strategy).split("\n")}) == 1
    outcomes = []
    for same in (strategy, read, strategy.copy()):
        try:
            outcomes.append(same.check_runnable())
        except ValueError as error:
            outcomes.append(str(error))
    assert len(set(outcomes)) == 1


def test_the_file_documents_the_whole_run(tmp_path):
    strategy = DistributedStrategy(amp=True, recompute_configs={"checkpoints": ['a"b\\', "ü*"]})
    strategy.save(tmp_path / "run.toml")
    assert DistributedStrategy.load(str(tmp_path / "run.toml")) == strategy
    written = tomllib.loads((tmp_path / "run.toml").read_text(encoding="utf-8"))
    plain = strategy.to_dict()
    for name in ("recompute_configs", "lars_configs", "lamb_configs"):  # what is None is left out
        plain[name] = {setting: value for setting, value in plain[name].items() if value is not None}
    assert "memory_budget" not in plain["recompute_configs"]
    assert written == plain


def test_a_file_of_a_pure_mode_names_the_dtype_in_force():
    strategy = DistributedStrategy(amp=True, amp_configs={"use_pure_bf16": True})
    assert 'dtype = "bfloat16"' in strategy.to_toml()
    DistributedStrategy.from_toml(strategy.to_toml()).check()


def test_to_dict_shares_nothing():
    strategy = DistributedStrategy()
    strategy.to_dict()["amp_configs"]["custom_white_list"].append("x")
    assert strategy == DistributedStrategy()


def test_what_cannot_be_read_back_is_not_written(tmp_path):
    strategy = DistributedStrategy()
    strategy.dgc_configs.sparsity.append(datetime.date(2024, 1, 1))
    with pytest.raises(TypeError, match=r"cannot be written as TOML: dgc_configs.sparsity\[1\] must be a number"):
        strategy.save(tmp_path / "run.toml")
    assert not (tmp_path / "run.toml").exists()


def test_numbers_put_in_place_are_written_as_plain_numbers():
    strategy = DistributedStrategy()
    strategy.recompute_configs.checkpoint_shape.append(enum.IntEnum("Size", {"SMALL": 3}).SMALL)
    assert "checkpoint_shape = [3]" in strategy.to_toml()


def test_a_file_with_mistakes_lists_them_all_and_itself(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("amp = 1\nlasr = true\n[gradient_merge_configs]\nk_steps = 2024-01-01\n[lamb_configs]\nx = 1\n")
    with pytest.raises(ValueError) as caught:
        DistributedStrategy.load(path)
    assert str(caught.value).splitlines() == [
        f"{path}: 4 problems",
        "  - amp must be True or False, got 1 (int); write True",
        "  - DistributedStrategy has no setting 'lasr'; did you mean 'lars'?",
        "  - gradient_merge_configs.k_steps must be an int >= 1, got datetime.date(2024, 1, 1) (date); "
        "write a whole number such as 1",
        "  - lamb_configs has no setting 'x'; valid names: lamb_weight_decay, exclude_from_weight_decay, "
        "exclude_from_adaptation, excluded_lr, zero_norm_lr, form, always_adapt, bias_correction, fused, "
        "trust_ratios_every",
    ]


@pytest.mark.parametrize(
    "text", ["amp = True", "amp", "[amp", "amp = true\namp = true", "nccl_comm_num = " + "9" * 5000]
)
def test_what_is_no_toml(text, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.toml must be valid TOML, got: .*; correct that line"):
        DistributedStrategy.load(path)


@pytest.mark.parametrize("nested", ["[", "{a="])
def test_toml_that_is_nested_too_deep(nested):
    with pytest.raises(ValueError, match="must be valid TOML, got values nested too deep; settings nest once"):
        DistributedStrategy.from_toml("amp = " + nested * 20_000)


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"run\.toml must be UTF-8 text, got: .*; save it as UTF-8"):
        DistributedStrategy.load(path)
    with pytest.raises(FileNotFoundError):
        DistributedStrategy.load(tmp_path / "missing.toml")


@pytest.mark.parametrize("value", [None, 5, [("amp", True)], "amp"])
def test_from_dict_takes_dicts(value):
    with pytest.raises(TypeError, match=r"DistributedStrategy must be a dict, got"):
        DistributedStrategy.from_dict(value)


def test_plain_python():
    """The strategy needs no torch: with its modules alone in a package, none is imported."""
    folder = Path(fleetx.strategy.__file__).parent
    code = f"""
import sys, types
package = types.ModuleType("fleetx")
package.__path__ = [{str(folder)!r}]
sys.modules["fleetx"] = package
import fleetx.strategy
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
