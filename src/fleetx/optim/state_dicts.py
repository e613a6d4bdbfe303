"""Loading saved optimizer state without rounding it, and refusing state that means something else here."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from fleetx.numbers import LOW_PRECISION
from fleetx.optim import foreign
from fleetx.optim.groups import Group, call_it, working_dtype
from fleetx.optim.sharded import cut_like

if TYPE_CHECKING:
    from fleetx.optim.layerwise import LayerwiseOptimizer


@contextmanager
def loading(optimizer: "LayerwiseOptimizer") -> Iterator[None]:
    """While torch loads a state dict: convert and check what comes, and keep what torch would round or replace."""
    groups, incoming = optimizer.param_groups, []
    masks = optimizer._masks

    def inspect(_: Optimizer, saved: StateDict) -> StateDict:
        saved = _with_all_masks(foreign.converted(optimizer, saved), masks)
        check_saved(type(optimizer).__name__, groups, saved, masks)
        incoming.append(saved)
        return saved

    def repair(_: Optimizer) -> None:
        ours = ["fused", *chain(masks.keys(), masks.values())]
        for own, loaded in zip(groups, optimizer.param_groups, strict=True):
            for setting in ("excluded_lr", "zero_norm_lr"):
                if setting in loaded:
                    own.pop(f"{setting}_ratio", None)  # it goes with the one that is loaded
            own.update(loaded | {key: own[key] for key in ours})
        optimizer.param_groups = groups
        optimizer.state.update(restored_state(groups, incoming[0]))

    # The last hook before and the first after, so that the user's hooks see what torch's would show them.
    before = optimizer.register_load_state_dict_pre_hook(inspect)
    after = optimizer.register_load_state_dict_post_hook(repair, prepend=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _with_all_masks(saved: StateDict, masks: Mapping[str, str]) -> StateDict:
    """A state that was saved when there was one list of exclusions: it served for all."""

    def completed(group: Group) -> Group:
        if "decays" not in group:
            return group
        return {**dict.fromkeys(masks, group["decays"]), **dict.fromkeys(masks.values()), **group}

    return {**saved, "param_groups": [completed(group) for group in saved["param_groups"]]}


def check_saved(kind: str, groups: list[Group], saved: StateDict, masks: Mapping[str, str]) -> None:
    """Refuse a state dict of another optimizer, of other exclusions or of another precision.

    Numbers of groups and parameters are left to torch, which checks them next.
    """
    for number, (own, theirs) in enumerate(zip(groups, saved["param_groups"], strict=False)):
        for mask, setting in masks.items():
            if mask not in theirs:
                raise ValueError(
                    f"group {number} of this state dict has no {mask!r}, so no {kind} saved it: load a state "
                    f"that a {kind} saved, or timm's or apex's. The buffers of other optimizers mean other things."
                )
            _check_mask(kind, number, own, theirs, mask, setting)
        _check_masters(own, theirs, saved)


def _check_mask(kind: str, number: int, own: Group, theirs: Group, mask: str, setting: str) -> None:
    pairs = zip(own[mask], theirs[mask], strict=False)
    differing = [index for index, (here, there) in enumerate(pairs) if here != there]
    if differing:
        raise ValueError(
            f"{setting} of this {kind} and of the saved state treat {len(differing)} parameters of "
            f"group {number} differently, {call_it(own, differing[0])} first: build the {kind} with "
            f"the saved patterns, {theirs[setting]!r}. To change them on purpose, write this one's {mask!r} "
            "into the saved group."
        )


def _check_masters(own: Group, theirs: Group, saved: StateDict) -> None:
    for index, (parameter, key) in enumerate(zip(own["params"], theirs["params"], strict=False)):
        if "master" in saved["state"].get(key, {}) and parameter.dtype not in LOW_PRECISION:
            raise ValueError(
                f"the saved state has an fp32 master for {call_it(own, index)}, which is {parameter.dtype} "
                "here: convert the model to the precision it was saved in before building the optimizer."
            )


def restored_state(groups: list[Group], saved: StateDict) -> dict[Tensor, dict[str, Any]]:
    """Copies of the saved state, by parameter, on the parameters' devices and in full precision."""
    keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in groups)
    return {
        parameter: {name: _copy(name, value, parameter) for name, value in saved["state"][key].items()}
        for key, parameter in zip(keys, parameters, strict=True)
        if key in saved["state"]
    }


def _copy(name: str, value: Any, parameter: Tensor) -> Any:
    """A copy, since steps write in place and what was loaded may still be in use."""
    if not isinstance(value, Tensor):
        return value
    if name == "step":
        return value.detach().to("cpu", copy=True)  # read by the host at every step
    whole = value.detach().to(parameter.device, working_dtype(parameter), copy=True)
    return cut_like(whole, parameter)
