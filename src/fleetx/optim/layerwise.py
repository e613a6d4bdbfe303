"""What Lars and Lamb share: who is excluded, fp32 masters, buckets of like tensors, state dicts.

The formulas exist twice: as foreach operations, which run everywhere and are the reference, and as kernels
(``fleetx.optim.fused``), which a CUDA device gets by itself.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from fleetx import inference
from fleetx.masters import follow
from fleetx.notices import tell_once
from fleetx.optim import groups, settling, state_dicts
from fleetx.optim.buckets import Bucket, measure
from fleetx.optim.checks import check_count, check_number, check_switch
from fleetx.optim.excluding import ExcludingOptimizer
from fleetx.optim.exclusion import EVERYTHING
from fleetx.optim.foreach import in_dtype, length_of_all, number_on, times
from fleetx.optim.fused import FusedStep, obstacle
from fleetx.optim.groups import LR_SHARES, Group, State, call_it, fix_lr_shares, working_dtype
from fleetx.optim.sharded import gradient_of, local
from fleetx.optim.watching import Entry, TrustRatios, Watch


class LayerwiseOptimizer(ExcludingOptimizer):
    """An optimizer whose step length is chosen per layer, with exclusions by name or kind.

    **Masters.** The state of a bf16 or fp16 parameter holds an fp32 ``master``, made from the parameter at
    the first step. All arithmetic is done on it and the result copied into the parameter, so steps smaller
    than the parameter's resolution add up. A parameter written from outside in between (new weights loaded)
    is noticed, also through ``.data``, and the master follows it wherever the two differ.

    **Exclusions** are decided when a group is added and kept in it as one bool per parameter, beside the
    patterns. Groups that state the same patterns are judged together: a pattern must take something in one.
    ``print(optimizer.exclusion_table())`` shows what they took.

    **Left out.** With ``skip_nonfinite``, or a ``found_inf`` from torch's GradScaler or from FleetX's step, a step
    whose gradients are inf or NaN changes nothing at all: no weight, no state, no count. Kernels decide that on the
    device; the foreach form asks for the answer, which waits for a device.

    **Zero weights.** A layer whose weights or gradients have length zero has no trust ratio: it moves at ``lr``
    itself, or at ``zero_norm_lr``. Where that is far more than the other layers got, the log says so after the
    first step.

    **Sharded parameters** (``fully_shard``) are served by the foreach form: each rank moves its own part, and all
    norms of a step travel in one all-reduce. LAMB has a second one where it clips or checks: the length of its
    directions is no function of a few sums and the clipping, and its moments cannot be taken back.

    **Loading.** Hyper-parameters come from the saved state, as in torch. Exclusions do not: an optimizer
    keeps its own, and a saved state that was trained with others, or in another form, is refused. Nor does
    ``fused``, which is a matter of the machine. States of timm's and apex's LARS and LAMB are converted
    (``fleetx.optim.foreign``).
    """

    keeps_masters: ClassVar[bool] = True
    _masks: ClassVar[settling.Masks] = {
        "decays": "exclude_from_weight_decay",
        "adapts": "exclude_from_adaptation",
    }
    # A step is left out, clipped and launched as a whole.
    _common: ClassVar[tuple[str, ...]] = ("fused", "max_grad_norm", "skip_nonfinite", "maximize")
    _buffers: ClassVar[tuple[str, ...]]
    _counts_steps: ClassVar[bool]
    _kernels: ClassVar[str]

    _replaced: Optimizer | None = None

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._begin()
        super().__init__(params, defaults)

    def _begin(self) -> None:
        """What is neither saved nor copied."""
        self._fused_step = FusedStep()
        self._watch = Watch()

    # What Lars and Lamb fill in.

    @abstractmethod
    def _decay_and_adapts(self, group: Group, index: int) -> tuple[float, bool]:
        """The weight decay of a parameter, and whether it has a trust ratio."""

    @abstractmethod
    def _traits(self, group: Group, index: int, state: State) -> tuple[Any, ...]:
        """What parameters must have in common to be updated together."""

    @abstractmethod
    def _measured_before(self, bucket: Bucket) -> Sequence[str]:
        """The lists of a bucket whose norms the formula needs before anything moves."""

    @abstractmethod
    def _direct(self, bucket: Bucket) -> Sequence[str]:
        """Prepare the step; gives the lists whose norms the rest of the formula needs."""

    @abstractmethod
    def _move(self, bucket: Bucket) -> Tensor | None:
        """Move the weights; gives the trust ratios if the bucket has them."""

    @abstractmethod
    def _hyper_key(self, group: Group) -> tuple[Any, ...]:
        """All settings of a group that its rows depend on."""

    @abstractmethod
    def _hyper_row(self, group: Group, index: int) -> tuple[float, ...]:
        """The settings of one parameter, as the kernels read them."""

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyrefly: ignore[bad-override]
        """Update every parameter that has a gradient; nothing here waits for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any("decays" not in group for group in self.param_groups):
            self._settle_groups()  # a group was added through the optimizer this one replaced
        compiling = torch.compiler.is_compiling()  # what looks around would break the graph
        if not compiling:
            inference.refuse_mode(f"{type(self).__name__}.step")
            self._check_scaling_once()
        if self._uses_kernels():
            self._fused_step(self)
        else:
            self._refuse_sparse_gradients()
            self._step_by_foreach()
        if not compiling:
            self._watch.tell_of_zeros(self._raw_ratios, self._labels)
        if self._replaced is not None:
            # A scheduler bound to the replaced one warns if that never stepped; it did, through us.
            self._replaced._opt_called = True  # pyrefly: ignore[missing-attribute]
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the device alone can leave a step out: torch's GradScaler and FleetX's step ask."""
        return self._uses_kernels()

    def _uses_kernels(self) -> bool:
        wish = self.param_groups[0]["fused"]
        if wish is False:
            return False
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if wish is None and not (parameters and parameters[0].is_cuda):
            return False
        reason = obstacle(parameters)
        if reason and wish:
            raise ValueError(
                f"fused=True needs parameters that kernels can serve, and {reason}: "
                "leave fused out to use kernels where they can be."
            )
        return reason is None

    def _step_by_foreach(self) -> None:
        found_inf = getattr(self, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)
        buckets = [] if skipped else self._buckets()
        if not buckets and not skipped:
            return
        if skipped or not self._unscale_and_clip(buckets):
            self._observe([])
            return
        measure(buckets, self._direct)
        found = []
        for bucket in buckets:
            ratios = self._move(bucket)
            self._copy_masters(bucket)
            if ratios is not None:
                found.append(Entry(bucket.numbers, ratios))
        self._observe(found)

    def _unscale_and_clip(self, buckets: Sequence[Bucket]) -> bool:
        """Measure and shorten the gradients; False if the step is left out."""
        scale = self._signed_scale()
        if scale is not None:
            factor = 1.0 / (scale.double() if isinstance(scale, Tensor) else scale)
            for bucket in buckets:
                bucket.gradients = times(bucket.gradients, number_on(factor, like=bucket.weights[0]))
        limit, check = (self.param_groups[0][name] for name in ("max_grad_norm", "skip_nonfinite"))
        together = ("gradients",) if limit is not None or check else ()
        measure(buckets, lambda bucket: dict.fromkeys([*self._measured_before(bucket), *together]))
        if not together:
            return True
        length = length_of_all([bucket.norms["gradients"] for bucket in buckets])
        if check and not bool(length.isfinite()):
            return False
        if limit is not None:
            clip = torch.where(length > limit, limit / length, 1.0)
            for bucket in buckets:
                factor = number_on(clip, like=bucket.weights[0])
                bucket.gradients = times(bucket.gradients, factor)
                bucket.norms["gradients"] = bucket.norms["gradients"] * factor
        return True

    def _signed_scale(self) -> float | Tensor | None:
        """What gradients are divided by before anything else; below 0 they are turned round, to maximize."""
        scale = getattr(self, "grad_scale", None)
        if not self.param_groups[0]["maximize"]:
            return scale
        return -1.0 if scale is None else -scale

    def _refuse_sparse_gradients(self) -> None:
        # Before anything moves: a half-made update cannot be taken back.
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                gradient = parameter.grad
                if gradient is not None and gradient.layout != torch.strided:
                    raise TypeError(
                        f"{type(self).__name__} needs dense gradients, and that of {call_it(group, index)} is "
                        f"{gradient.layout}: use sparse=False, or another optimizer for it."
                    )

    def _buckets(self) -> list[Bucket]:
        buckets: dict[tuple[Any, ...], Bucket] = {}
        for number, group, index, parameter in self._places():
            if parameter.grad is None or parameter.numel() == 0:
                continue
            state = self.state[parameter]
            weights = self._weights(parameter, state)
            if weights is not parameter:
                follow(local(weights), local(parameter.detach()))
            self._make_state(state, weights)
            if self._counts_steps and state["step"].device.type != "cpu":
                state["step"] = state["step"].cpu()  # once, when kernels served until now
            traits = self._traits(group, index, state)
            key = (id(group), weights.device, weights.dtype, *traits)
            bucket = buckets.get(key) or buckets.setdefault(key, Bucket(group, traits))
            bucket.numbers.append(number)
            bucket.parameters.append(parameter)
            bucket.weights.append(local(weights))
            bucket.gradients.append(gradient_of(parameter))
            bucket.states.append(state)
        for bucket in buckets.values():
            bucket.gradients = in_dtype(bucket.gradients, bucket.weights[0].dtype)
        return list(buckets.values())

    def _places(self) -> Iterable[tuple[int, Group, int, Tensor]]:
        places = [(group, index, p) for group in self.param_groups for index, p in enumerate(group["params"])]
        return ((number, *place) for number, place in enumerate(places))

    def _make_state(self, state: State, weights: Tensor) -> None:
        """Make what is missing of a parameter's state."""
        for name in self._buffers:
            if name not in state:
                state[name] = torch.zeros_like(weights)
        if self._counts_steps and "step" not in state:
            # On the host, as torch's own: reading it there waits for nothing. Kernels take it to the device.
            state["step"] = torch.zeros((), dtype=torch.float32)

    # Masters.

    def _weights(self, parameter: Tensor, state: State) -> Tensor:
        """What the formulas read and write; a master is made where one is missing."""
        dtype = working_dtype(parameter)
        if parameter.dtype == dtype:
            return parameter
        if state.get("master") is None:
            state["master"] = parameter.detach().to(dtype)
        return state["master"]

    def _copy_masters(self, bucket: Bucket) -> None:
        pairs = [(p, w) for p, w in zip(bucket.parameters, bucket.weights, strict=True) if p.dtype != w.dtype]
        if pairs:
            torch._foreach_copy_([local(parameter) for parameter, _ in pairs], [master for _, master in pairs])

    # Trust ratios.

    def observe_trust_ratios(self, every: int | None) -> None:
        """Collect the trust ratios of every step, and hand them out every so many; None stops it."""
        if every is not None:
            check_count("every", every, usual="100 is usual, None stops it")
        self._watch.begin(every)

    @property
    def trust_ratios(self) -> TrustRatios | None:
        """The ratios handed out last; None if ``observe_trust_ratios`` has not had its steps yet."""
        return self._watch.latest

    def _observe(self, found: Sequence[Entry]) -> None:
        """Hand the ratios of a step over; one that was left out has none, and counts all the same."""
        if not self._watch.wants:
            return
        # The same at each step, since those of several are joined.
        device = next((parameter.device for *_, parameter in self._places()), torch.device("cpu"))
        numbers = [number for entry in found for number in entry.numbers]
        values = [torch.empty(0, dtype=torch.float64, device=device)]
        values += [entry.values.to(device, torch.float64) for entry in found]
        self._watch.record(Entry(numbers, torch.cat(values)), self._read_ratios)

    def _read_ratios(self, entries: Sequence[Entry]) -> TrustRatios:
        adapted = [number for number, group, index, _ in self._places() if self._decay_and_adapts(group, index)[1]]
        return TrustRatios(entries, self._labels, adapted)

    def _labels(self) -> list[str]:
        infos = groups.infos(self.param_groups)
        return [info.name if info else f"parameter {number}" for number, info in enumerate(infos)]

    def _raw_ratios(self) -> list[float]:
        """What stands for the ratio of a layer without length."""
        return [group.get("zero_norm_lr_ratio", 1.0) for _, group, _, _ in self._places()]

    # Groups and exclusions.

    def exclusion_table(self) -> str:
        """What was excluded from decay, and from adaptation by lists and by the form, as a table to print."""
        decided = [self._decay_and_adapts(group, index) for _, group, index, _ in self._places()]
        listed = any(group["exclude_from_adaptation"] is not None for group in self.param_groups)
        parts = {
            "without weight decay": self.exclusion_rows(),
            "without trust ratio": self.exclusion_rows("exclude_from_adaptation") if listed else [],
        }
        counts = {
            "without weight decay": sum(not decay for decay, _ in decided),
            "without trust ratio": sum(not adapts for _, adapts in decided),
        }
        title = f"{type(self).__name__}, form {self.param_groups[0]['form']}"
        return settling.table(title, parts, counts, of=len(decided))

    def add_param_group(self, param_group: Group) -> None:
        """Add a group. ``weight_decay``, torch's name, stands for ours; 0 there excludes the group from decay."""
        if self._replaced is None and isinstance(param_group, dict) and "weight_decay" in param_group:
            param_group = self._in_our_words(param_group)
        super().add_param_group(param_group)

    def _in_our_words(self, group: Group) -> Group:
        decay, name = group["weight_decay"], f"{self._kernels}_weight_decay"
        check_number("weight_decay", decay, usual=f"it is {name} by torch's name, and 0 excludes a group from decay")
        if group.get(name, decay) != decay:
            raise ValueError(
                f"weight_decay and {name} of a group are one setting, got {decay!r} and {group[name]!r}: give one."
            )
        excluded = {"exclude_from_weight_decay": [EVERYTHING]} if decay == 0 else {}
        return {key: value for key, value in group.items() if key != "weight_decay"} | {name: decay} | excluded

    def _settle_groups(self) -> None:
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            if self._replaced is not None and "decays" not in group:
                group["fused"] = self.param_groups[0]["fused"]  # added through the replaced one, whose kernels differ
        super()._settle_groups()
        self._tell_of_idle_rate()

    def _check_group(self, group: Group) -> None:
        fix_lr_shares(group, *LR_SHARES)
        if group["fused"] is not None:
            check_switch("fused", group["fused"])
        check_switch("skip_nonfinite", group["skip_nonfinite"])
        check_switch("maximize", group["maximize"])
        if group["max_grad_norm"] is not None:
            check_number("max_grad_norm", group["max_grad_norm"], above=0, usual="1.0 is usual, None is no limit")

    def _known_settings(self) -> list[str]:
        """Ours and those of the optimizer that is replaced, which stand in the same groups."""
        return [*super()._known_settings(), *([] if self._replaced is None else self._replaced.defaults)]

    def _state_names(self, group: Group, index: int) -> tuple[str, ...]:  # noqa: ARG002
        return (*self._buffers, *(("step",) if self._counts_steps else ()))

    def _tell_of_idle_rate(self) -> None:
        """Say once that nobody moves at ``excluded_lr``; a list of kinds may well take nothing."""
        rates = [group["excluded_lr"] for group in self.param_groups if group["excluded_lr"] is not None]
        lists = [group[setting] for group in self.param_groups for setting in self._masks.values()]
        if not rates or any(lists):
            return
        if all(self._decay_and_adapts(group, index)[1] for _, group, index, _ in self._places()):
            tell_once(
                "idle excluded_lr",
                f"excluded_lr={rates[0]!r} is the learning rate of parameters without trust ratio, and here all have "
                "one: give exclude_from_adaptation or exclude_from_weight_decay, or leave it out.",
            )

    # State dicts.

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        super().__setstate__(state)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what ``state_dict`` gave: fp32 state stays fp32, groups stay the same objects.

        torch's own version casts state to the parameter's dtype, which would round masters and moments, and
        builds new group dicts, which would part us from the schedulers of a replaced optimizer.
        """
        with state_dicts.loading(self):
            super().load_state_dict(state_dict)
