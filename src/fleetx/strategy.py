"""DistributedStrategy: what the user asks for. Typed, checked, printable, and plain Python."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from fleetx import boxes
from fleetx.layerwise_configs import LambConfigs, LarsConfigs
from fleetx.notices import Problems, tell_once
from fleetx.settings import (
    Bool,
    ByteSize,
    Choice,
    Configs,
    Float,
    Int,
    ListOf,
    OrNone,
    Section,
    Setting,
    Settings,
    Text,
)

# Accepted, saved and printed, but not yet carried out. Whoever builds a feature deletes its row.
UNBUILT = {
    "localsgd": "local SGD",
    "dgc": "deep gradient compression",
    "sharding": "sharding of optimizer states",
}


# The settings that only float16 uses.
LOSS_SCALE = (
    "init_loss_scaling",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_ratio",
    "decr_ratio",
    "use_dynamic_loss_scaling",
)


class AmpDtype(Choice):
    """The low precision. Until somebody sets it, the pure mode decides."""

    def read(self, settings: Settings) -> str:
        """The precision in force."""
        if not settings.was_given(self.name) and settings._values["use_pure_bf16"]:
            return "bfloat16"
        return super().read(settings)


class AmpConfigs(Configs):
    """Automatic mixed precision: the loss scale, and what runs in low precision."""

    init_loss_scaling = Float(32768.0, at_least=1)
    incr_every_n_steps = Int(1000, at_least=1)
    decr_every_n_nan_or_inf = Int(2, at_least=1)
    incr_ratio = Float(2.0, above=1)
    decr_ratio = Float(0.8, above=0, below=1)
    use_dynamic_loss_scaling = Bool(True)
    custom_white_list = ListOf(Text("encoder"))  # modules kept in low precision
    custom_black_list = ListOf(Text("encoder"))  # modules kept out of it
    use_pure_fp16 = Bool(False)
    use_pure_bf16 = Bool(False)
    dtype = AmpDtype("float16", "bfloat16")

    def in_force(self) -> dict[str, object]:
        """Without the loss scale where bfloat16 needs none."""
        resting = LOSS_SCALE if self.dtype == "bfloat16" else ()
        return {name: value for name, value in super().in_force().items() if name not in resting}


class Checkpoints(Setting["list[str] | str", "list[str] | tuple[str, ...] | str"]):
    """Names or globs of modules, or the word "auto"."""

    def __init__(self) -> None:
        super().__init__([])
        self._names = ListOf(Text("encoder.layer.*"))
        self._names.rule = 'a list of names or globs, or "auto"'

    def fresh_default(self) -> list[str]:
        """No cuts."""
        return []

    def accept(self, value: object, path: str, problems: Problems) -> list[str] | str:
        """See Setting."""
        if isinstance(value, str) and value == "auto":
            return "auto"
        if isinstance(value, str) and value.lower() == "auto":
            problems.wrong_type(path, self._names.rule, value, 'write "auto"')
            return []
        return self._names.accept(value, path, problems)


class RecomputeConfigs(Configs):
    """Recompute activations segment by segment: where the model is cut, and where the cuts live."""

    checkpoints = Checkpoints()
    enable_offload = Bool(False)  # the checkpoints wait in pinned host memory
    checkpoint_shape = ListOf(Int(1, at_least=1))  # Fleet needs it; here any shapes work
    memory_budget = OrNone(ByteSize("30GiB"))  # with "auto": the most memory a step may take
    global_batch = OrNone(Int(256, at_least=1))  # with "auto": samples of an update, which the planner then cuts
    oom_retry = Bool(False)  # with "auto": a step that runs out of memory is done again with a smaller plan

    def in_force(self) -> dict[str, object]:
        """Without the retry where nobody asked for it."""
        return {name: value for name, value in super().in_force().items() if name != "oom_retry" or value}


class GradientMergeConfigs(Configs):
    """k micro-batches, one update."""

    k_steps = Int(1, at_least=1)
    avg = Bool(True)


class LocalSGDConfigs(Configs):
    """Local SGD: ranks average their weights every k steps."""

    k_steps = Int(1, at_least=1)
    begin_step = Int(1, at_least=1)


class DGCConfigs(Configs):
    """Deep gradient compression: only the largest gradients travel."""

    rampup_begin_step = Int(0, at_least=0)
    rampup_step = Int(1, at_least=1)
    sparsity = ListOf(Float(0.999, at_least=0, below=1), [0.999])


class ShardingConfigs(Configs):
    """Sharding: each rank holds a part of the states."""

    sharding_segment_strategy = Choice("segment_broadcast_MB", "segment_anchors")
    segment_broadcast_MB = Float(32.0, above=0)  # noqa: N815  Fleet's spelling
    segment_anchors = ListOf(Text("encoder.layer.0"))
    sharding_degree = Int(8, at_least=1)
    dp_degree = Int(1, at_least=1)
    mp_degree = Int(1, at_least=1)
    gradient_merge_acc_step = Int(1, at_least=1)
    optimize_offload = Bool(False)


class _NoMeaning(Configs):
    """Settings of Fleet's executor: taken, so that scripts of the guide run, and said to do nothing here."""

    def _store(self, accepted: dict[str, Any]) -> None:
        super()._store(accepted)
        name = self._path
        if name:  # else they are not yet part of a strategy
            tell_once(f"strategy.{name}", f"{name} has no effect on PyTorch; it may be left out of the script")


class ExecutionStrategy(_NoMeaning):
    """Fleet's executor threads; no meaning here."""

    num_threads = Int(1, at_least=1)
    num_iteration_per_drop_scope = Int(1, at_least=1)


class BuildStrategy(_NoMeaning):
    """Fleet's graph passes; no meaning here."""

    enable_sequential_execution = Bool(False)
    enable_inplace = Bool(False)
    enable_addto = Bool(False)
    enable_auto_fusion = Bool(False)
    fuse_broadcast_ops = Bool(False)
    fuse_all_optimizer_ops = Bool(False)
    fuse_elewise_add_act_ops = Bool(False)
    fuse_bn_act_ops = Bool(False)
    fuse_relu_depthwise_conv = Bool(False)
    sync_batch_norm = Bool(False)  # check() asks for the strategy's own
    memory_optimize = Bool(False)
    remove_unnecessary_lock = Bool(True)


class DistributedStrategy(Settings):
    """What a job should do: each feature is a switch, and most have `<switch>_configs` beside it.

    >>> strategy = DistributedStrategy(gradient_merge=True)
    >>> strategy.gradient_merge_configs = {"k_steps": 4}
    >>> strategy.gradient_merge_configs.k_steps
    4
    """

    amp = Bool(False)
    amp_configs = Section(AmpConfigs)
    recompute = Bool(False)
    recompute_configs = Section(RecomputeConfigs)
    gradient_merge = Bool(False)
    gradient_merge_configs = Section(GradientMergeConfigs)
    lars = Bool(False)
    lars_configs = Section(LarsConfigs)
    lamb = Bool(False)
    lamb_configs = Section(LambConfigs)
    localsgd = Bool(False)
    localsgd_configs = Section(LocalSGDConfigs)
    dgc = Bool(False)
    dgc_configs = Section(DGCConfigs)
    sharding = Bool(False)
    sharding_configs = Section(ShardingConfigs)

    # gradients between ranks
    fuse_all_reduce_ops = Bool(True)  # buckets: fewer, larger all-reduces
    fuse_grad_size_in_MB = Int(32, at_least=1)  # noqa: N815  Fleet's spelling
    last_comm_group_size_MB = Float(1.0, above=0)  # noqa: N815  Fleet's spelling
    nccl_comm_num = Int(1, at_least=1)
    use_hierarchical_allreduce = Bool(False)  # within a node, then between nodes
    hierarchical_allreduce_inter_nranks = Int(1, at_least=1)  # ranks per node group
    fp16_allreduce = Bool(False)
    bf16_allreduce = Bool(False)
    find_unused_parameters = Bool(False)

    sync_batch_norm = Bool(False)  # statistics of BatchNorm layers over all ranks
    compile = Bool(False)

    execution_strategy = Section(ExecutionStrategy)
    build_strategy = Section(BuildStrategy)

    def check(self) -> None:
        """Check every value and what they mean together; raise one error that names all problems."""
        self._problems().raise_if_any("the strategy")

    def prepared_but_off(self) -> list[str]:
        """Switches that are off although their configs were changed."""
        switches = [name for name in self._declared if f"{name}_configs" in self._declared]
        return [name for name in switches if not getattr(self, name) and self.is_changed(f"{name}_configs")]

    def check_runnable(self) -> None:
        """`check()`, and that every feature that is on has been built."""
        problems = self._problems()
        for name, feature in UNBUILT.items():
            if getattr(self, name):
                problems.add(f"{name} ({feature}) is not supported yet, got True; set {name} = False")
        problems.raise_if_any("the strategy")

    def _problems(self) -> Problems:
        problems = Problems()
        self.recheck(problems)
        for message in _contradictions(self):
            problems.add(message)
        return problems

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values; Fleet's executor settings only where they were changed."""
        plain = super().to_dict()
        untouched = [name for name in ("execution_strategy", "build_strategy") if not self.is_changed(name)]
        return {name: value for name, value in plain.items() if name not in untouched}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """The strategy with these settings, and the default for what they do not name."""
        strategy = cls()
        strategy.update(settings)
        return strategy

    def to_toml(self) -> str:
        """All settings as TOML, defaults too, so that the text documents a run. What is None is left out."""
        checked = type(self)()  # a text that cannot be read back would document nothing
        checked.update(self.to_dict(), "cannot be written as TOML")
        plain = checked.to_dict()
        lines = _toml_lines({name: value for name, value in plain.items() if not isinstance(value, dict)})
        for name, value in plain.items():
            if isinstance(value, dict):
                lines += ["", f"[{name}]", *_toml_lines(value)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str, source: str = "TOML text") -> Self:
        """The strategy in a TOML text; errors mention its `source`."""
        try:
            settings = tomllib.loads(text)
        except ValueError as error:
            raise ValueError(f"{source} must be valid TOML, got: {error}; correct that line") from None
        except RecursionError:
            raise ValueError(f"{source} must be valid TOML, got values nested too deep; settings nest once") from None
        strategy = cls()
        strategy.update(settings, source)
        return strategy

    def save(self, path: str | Path) -> None:
        """Write the strategy to a TOML file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a strategy from a TOML file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8 text, got: {error}; save it as UTF-8") from None
        return cls.from_toml(text, str(path))

    def __str__(self) -> str:
        return self.overview()

    def overview(self, width: int | None = None) -> str:
        """The guide's box of what is on, with its settings; where that is wider than `width`, a list."""
        shown = "DistributedStrategy Overview", list(self._sections()), "every feature is off"
        box = boxes.overview_box(*shown)
        return box if width is None or len(box.partition("\n")[0]) <= width else boxes.overview_list(*shown)

    def _sections(self) -> Iterator[boxes.Section]:
        """What the overview shows: each switch that is on with its configs, then what else was changed."""
        others: dict[str, object] = {}
        for name, one in self._declared.items():
            configs = f"{name}_configs"
            if configs in self._declared and getattr(self, name):
                yield boxes.Section(f"{name}=True <-> {configs}", getattr(self, configs).in_force())
            elif not isinstance(one, Section) and self.is_changed(name):
                others[name] = getattr(self, name)
        if others:
            yield boxes.Section("communication and other settings", others)

    def __repr__(self) -> str:
        changed = {name: getattr(self, name) for name in self._declared if self.is_changed(name)}
        shown = [f"{name}={dict(v) if isinstance(v, Configs) else v!r}" for name, v in changed.items()]
        return f"{type(self).__name__}({', '.join(shown)})"

    def is_changed(self, name: str) -> bool:
        """Whether a setting differs from its default."""
        return getattr(self, name) != self._declared[name].fresh_default()


def _toml_lines(values: Mapping[str, object]) -> list[str]:
    return [f"{name} = {_toml_value(value)}" for name, value in values.items() if value is not None]


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):  # printable, as its setting saw to: only these two have a meaning in quotes
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def _contradictions(strategy: DistributedStrategy) -> Iterator[str]:
    """What is on and cannot be together. What is off is not looked at: it may be left half prepared."""
    if strategy.lars and strategy.lamb:
        yield "lars and lamb must not both be on, got True and True; set one of them to False"
    if strategy.fp16_allreduce and strategy.bf16_allreduce:
        yield "fp16_allreduce and bf16_allreduce must not both be on, got True and True; set one to False"
    if strategy.amp:
        yield from _amp_contradictions(strategy.amp_configs)
    if strategy.recompute:
        yield from _recompute_contradictions(strategy.recompute_configs)
        if strategy.gradient_merge and strategy.recompute_configs.global_batch is not None:
            yield (
                "recompute_configs.global_batch lets the planner cut batches, and must not be set while gradient_merge "
                f"cuts them into k_steps, got {strategy.recompute_configs.global_batch}; set gradient_merge = False, "
                "or global_batch = None"
            )
    if strategy.build_strategy.sync_batch_norm and not strategy.sync_batch_norm:
        yield "build_strategy.sync_batch_norm must not be on alone, got True; set strategy.sync_batch_norm"
    if strategy.dgc and not strategy.dgc_configs.sparsity:
        yield "dgc_configs.sparsity must not be empty while dgc is on, got []; write for example [0.999]"
    sharding = strategy.sharding_configs
    by_anchors = sharding.sharding_segment_strategy == "segment_anchors"
    if strategy.sharding and by_anchors and not sharding.segment_anchors:
        yield (
            "sharding_configs.segment_anchors must name modules for 'segment_anchors', got []; "
            "name them, or set sharding_segment_strategy = 'segment_broadcast_MB'"
        )


def _amp_contradictions(amp: AmpConfigs) -> Iterator[str]:
    if amp.use_pure_fp16 and amp.use_pure_bf16:
        yield "amp_configs must not set use_pure_fp16 and use_pure_bf16, got True and True; set one to False"
    elif amp.use_pure_fp16 and amp.dtype != "float16":
        yield _pure_against_dtype("use_pure_fp16", "float16", amp.dtype)
    elif amp.use_pure_bf16 and amp.dtype != "bfloat16":
        yield _pure_against_dtype("use_pure_bf16", "bfloat16", amp.dtype)
    both = [name for name in amp.custom_white_list if name in amp.custom_black_list]
    if both:
        yield (
            f"amp_configs.custom_white_list and custom_black_list must not overlap, got {both} in both; "
            "take each name out of one of them"
        )


def _pure_against_dtype(pure: str, needed: str, dtype: str) -> str:
    return f"amp_configs.dtype must be {needed!r} with {pure}, got {dtype!r}; set that, or {pure} = False"


def _recompute_contradictions(recompute: RecomputeConfigs) -> Iterator[str]:
    if not recompute.checkpoints:
        yield (
            "recompute_configs.checkpoints must say where the model is cut while recompute is on, got []; "
            'write names or globs of modules such as ["encoder.layer.*"], or "auto"'
        )
    if recompute.checkpoints != "auto":
        for name in ("memory_budget", "global_batch", "oom_retry"):
            if recompute[name] not in (None, False):
                yield (
                    f'recompute_configs.{name} must only be set with checkpoints = "auto", '
                    f'got {recompute[name]!r}; set checkpoints = "auto", or {name} = {getattr(_UNSET, name)}'
                )


_UNSET = RecomputeConfigs()
