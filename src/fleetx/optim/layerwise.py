"""What Lars and Lamb share: who is excluded, fp32 masters, buckets of like tensors, state dicts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from fleetx import names
from fleetx.optim.exclusion import Exclusion, ExclusionRow, check_patterns, exclude
from fleetx.optim.foreach import in_dtype
from fleetx.optim.groups import DTYPES, Group, State, call_it, infos, working_dtype
from fleetx.optim.state_dicts import check_saved, restored_state


@dataclass
class Bucket:
    """Parameters of one device, one dtype and equal traits: one foreach call serves them all.

    ``weights`` are what the formulas read and write: the fp32 master where there is one, else the parameter.
    """

    traits: tuple[Any, ...]
    parameters: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def collect(self, name: str) -> list[Tensor]:
        """One entry of every parameter's state."""
        return [state[name] for state in self.states]


class LayerwiseOptimizer(Optimizer):
    """An optimizer whose step length is chosen per layer, with exclusions by name or kind.

    **Masters.** The state of a bf16 or fp16 parameter holds an fp32 ``master``, made from the parameter at
    the first step. All arithmetic is done on it and the result copied into the parameter, so steps smaller
    than the parameter's resolution add up. A parameter written from outside in between (new weights loaded)
    is noticed, and the master follows it wherever the two differ.

    **Exclusions** are decided when a group is added and kept in it as one bool per parameter, beside the
    patterns. Groups that state the same patterns are judged together: a pattern must take something in one.

    **Loading.** Hyper-parameters come from the saved state, as in torch. Exclusions do not: an optimizer
    keeps its own, and a saved state that was trained with others is refused.
    """

    keeps_masters: ClassVar[bool] = True
    # The mask that each exclusion setting gives; a setting of None follows exclude_from_weight_decay.
    _masks: ClassVar[dict[str, str]] = {"decays": "exclude_from_weight_decay"}

    _settles_each_group = True
    _replaced: Optimizer | None = None

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._versions_written: dict[Tensor, int] = {}
        self._settles_each_group = False  # a pattern may take something in the last group only
        super().__init__(params, defaults)
        self._settles_each_group = True
        self._settle_groups()

    # What Lars and Lamb fill in.

    def _check_group(self, group: Group) -> None:
        """Raise if a setting of the group is wrong; derive what depends on several."""
        raise NotImplementedError

    def _prepare_state(self, state: State, weights: Tensor) -> None:
        """Make what is missing of a parameter's state, and count the step."""
        raise NotImplementedError

    def _traits(self, group: Group, index: int, state: State) -> tuple[Any, ...]:
        """What parameters must have in common to be updated together."""
        raise NotImplementedError

    def _update(self, group: Group, bucket: Bucket) -> None:
        """Apply the formula to one bucket, in place."""
        raise NotImplementedError

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
        self._refuse_sparse_gradients()
        for group in self.param_groups:
            for bucket in self._buckets(group):
                self._update(group, bucket)
                self._copy_masters(bucket)
        if self._replaced is not None:
            # A scheduler bound to the replaced one warns if that never stepped; it did, through us.
            self._replaced._opt_called = True  # pyrefly: ignore[missing-attribute]
        return loss

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

    def _buckets(self, group: Group) -> Iterable[Bucket]:
        buckets: dict[tuple[Any, ...], Bucket] = {}
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is None or parameter.numel() == 0:
                continue
            state = self.state[parameter]
            weights = self._weights(parameter, state)
            self._prepare_state(state, weights)
            traits = self._traits(group, index, state)
            key = (weights.device, weights.dtype, *traits)
            bucket = buckets.get(key) or buckets.setdefault(key, Bucket(traits))
            bucket.parameters.append(parameter)
            bucket.weights.append(weights)
            bucket.gradients.append(parameter.grad)
            bucket.states.append(state)
        for bucket in buckets.values():
            bucket.gradients = in_dtype(bucket.gradients, bucket.weights[0].dtype)
        return buckets.values()

    # Masters.

    def _weights(self, parameter: Tensor, state: State) -> Tensor:
        dtype = working_dtype(parameter)
        if parameter.dtype == dtype:
            return parameter
        master = state.get("master")
        if master is None:
            master = state["master"] = parameter.detach().to(dtype)
        elif self._versions_written.get(parameter) != parameter._version:
            # Written since our last step, or just loaded. Where the parameter still is the rounded master,
            # the master keeps its finer bits.
            unchanged = parameter == master.to(parameter.dtype)
            master.copy_(torch.where(unchanged, master, parameter.to(dtype)))
        return master

    def _copy_masters(self, bucket: Bucket) -> None:
        pairs = [(p, w) for p, w in zip(bucket.parameters, bucket.weights, strict=True) if p is not w]
        if pairs:
            torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])
        for parameter, _ in pairs:
            self._versions_written[parameter] = parameter._version

    # Groups and exclusions.

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; its patterns are resolved now, and a group that is refused is not added."""
        super().add_param_group(param_group)
        if self._settles_each_group:
            try:
                self._settle_groups()
            except Exception:
                self.param_groups.pop()
                raise

    def exclusion_rows(self, setting: str = "exclude_from_weight_decay") -> list[ExclusionRow]:
        """Per pattern of a setting: how many parameters it took, and the first of their names."""
        settings = list(self._masks.values())
        if setting not in settings:
            raise ValueError(f"{type(self).__name__} has no {setting!r}: ask for one of {', '.join(settings)}.")
        taken: dict[str, tuple[str, ...]] = {}
        for _, exclusion in self._judge(setting):
            for pattern, took in exclusion.taken.items():
                taken[pattern] = taken.get(pattern, ()) + took
        return Exclusion((), taken).rows()

    def _settle_groups(self) -> None:
        """Check every group, and write the masks its patterns give into it."""
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            self._check_dtypes(group)
            self._check_group(group)
            for setting in self._masks.values():
                if group[setting] is not None:
                    check_patterns(group[setting], setting)
                    group[setting] = list(group[setting])
        for mask, setting in self._masks.items():
            for groups, exclusion in self._judge(setting):
                excluded = iter(exclusion.mask)
                for group in groups:
                    group[mask] = [not next(excluded) for _ in group["params"]]

    def _check_dtypes(self, group: Group) -> None:
        for index, parameter in enumerate(group["params"]):
            if parameter.dtype not in DTYPES:
                raise TypeError(
                    f"{type(self).__name__} updates parameters of {', '.join(map(str, DTYPES))}, and "
                    f"{call_it(group, index)} is {parameter.dtype}: give it another optimizer"
                    f"{', or keep it as real (torch.view_as_real)' if parameter.is_complex() else ''}."
                )

    def _judge(self, setting: str) -> list[tuple[list[Group], Exclusion]]:
        """Who the patterns of a setting take, for all groups with the same patterns at once."""
        alike: dict[tuple[str, ...], list[Group]] = {}
        for group in self.param_groups:
            patterns = group["exclude_from_weight_decay"] if group[setting] is None else group[setting]
            alike.setdefault(tuple(patterns), []).append(group)
        return [
            (groups, exclude(patterns, infos(groups), known_kinds=names.KINDS, setting=setting))
            for patterns, groups in alike.items()
        ]

    # Taking another optimizer's place.

    @classmethod
    def _sharing(cls, wrapped: Optimizer, **settings: Any) -> Self:
        """Ours on the very list and dicts of the wrapped one, so that what is bound to it keeps working."""
        cls._check_unused(wrapped)
        before = [dict(group) for group in wrapped.param_groups]
        try:
            ours = cls(wrapped.param_groups, **settings)
        except Exception:
            for group, old in zip(wrapped.param_groups, before, strict=True):
                group.clear()
                group.update(old)
            raise
        ours.param_groups = wrapped.param_groups
        ours._replaced = wrapped
        return ours

    @classmethod
    def _check_unused(cls, wrapped: Optimizer) -> None:
        kind = type(wrapped).__name__
        if any("decays" in group for group in wrapped.param_groups):
            raise ValueError(f"an optimizer can be replaced once, and this {kind} was already: build a new {kind}.")
        if wrapped.state:
            raise ValueError(
                f"{cls.__name__} replaces an optimizer before its first step, and this {kind} has state of "
                f"{len(wrapped.state)} parameters: replace it first, then load what a {cls.__name__} saved."
            )

    # State dicts.

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._versions_written = {}
        super().__setstate__(state)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load what ``state_dict`` gave: fp32 state stays fp32, groups stay the same objects.

        torch's own version casts state to the parameter's dtype, which would round masters and moments, and
        builds new group dicts, which would part us from the schedulers of a replaced optimizer.
        """
        groups, incoming = self.param_groups, []

        def inspect(_: Optimizer, saved: StateDict) -> None:
            check_saved(type(self).__name__, groups, saved, self._masks)
            incoming.append(saved)

        def repair(_: Optimizer) -> None:
            ours = list(chain(self._masks.keys(), self._masks.values()))
            for own, loaded in zip(groups, self.param_groups, strict=True):
                own.update(loaded | {key: own[key] for key in ours})
            self.param_groups = groups
            self.state.update(restored_state(groups, incoming[0]))

        # The last hook before and the first after, so that the user's hooks see what torch's would show them.
        before = self.register_load_state_dict_pre_hook(inspect)
        after = self.register_load_state_dict_post_hook(repair, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()
