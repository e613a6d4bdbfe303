"""Loading saved optimizer state without rounding it, and refusing state that means something else here."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, StateDict

from fleetx.names import displacement
from fleetx.numbers import LOW_PRECISION
from fleetx.optim import foreign
from fleetx.optim.checks import ROUNDING, check_lr
from fleetx.optim.forms import LAMB_FORMS, LARS_FORMS
from fleetx.optim.groups import LR_SHARES, Group, call_it, working_dtype
from fleetx.optim.sharded import cut_like

if TYPE_CHECKING:
    from fleetx.optim.excluding import ExcludingOptimizer
    from fleetx.optim.layerwise import LayerwiseOptimizer

# What stands in the groups of one of ours alone.
MARKS = {"Lars": "lars_coeff", "Lamb": "lamb_weight_decay", "Muon": "orthogonal"}


@contextmanager
def loading(optimizer: "LayerwiseOptimizer") -> Iterator[None]:
    """While torch loads a state dict: convert and check what comes, and keep what torch would round or replace."""
    groups, incoming = optimizer.param_groups, []
    masks = optimizer._masks

    def inspect(_: Optimizer, saved: StateDict) -> StateDict:
        saved = _with_all_masks(foreign.converted(optimizer, saved), masks)
        check_saved(optimizer, saved, ", or timm's or apex's")
        incoming.append(saved)
        return saved

    def repair(_: Optimizer) -> None:
        ours = ["fused", "param_names", *chain(masks.keys(), masks.values())]
        for own, loaded in zip(groups, optimizer.param_groups, strict=True):
            for setting in LR_SHARES:
                if setting in loaded:
                    own.pop(f"{setting}_ratio", None)  # it goes with the one that is loaded
            own.update(loaded | {key: own[key] for key in ours if key in own})
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


def check_saved(optimizer: "ExcludingOptimizer", saved: StateDict, or_others: str = "") -> None:
    """Refuse a state dict that the optimizer could not continue from, or not in the way it was trained.

    Numbers of groups and parameters are left to torch, which checks them next.
    """
    kind = type(optimizer).__name__
    order, own_order = (
        [group.get("param_names", []) for group in groups] for groups in (saved["param_groups"], optimizer.param_groups)
    )
    if displaced := displacement(order, own_order):
        raise ValueError(f"this state dict is of another order of parameters: {displaced}.")
    for number, (own, theirs) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=False)):
        _check_whose(optimizer, number, theirs, or_others)
        for mask, setting in optimizer._masks.items():
            _check_mask(kind, number, own, theirs, mask, setting)
        _check_form(kind, number, own, theirs)
        _check_masters(own, theirs, saved)
    _check_settings(optimizer, saved)
    _check_states(optimizer, saved)


def _check_whose(optimizer: "ExcludingOptimizer", number: int, theirs: Group, or_others: str) -> None:
    kind = type(optimizer).__name__
    own_mark = next(MARKS[cls.__name__] for cls in type(optimizer).__mro__ if cls.__name__ in MARKS)
    missing = [name for name in ("decays", own_mark) if name not in theirs]
    if missing:
        saver = next((f", but a {other}" for other, mark in MARKS.items() if mark in theirs), "")
        raise ValueError(
            f"group {number} of this state dict has no {missing[0]!r}, so no {kind} saved it{saver}: load a state "
            f"that a {kind} saved{or_others}. The buffers of other optimizers mean other things."
        )


def _check_settings(optimizer: "ExcludingOptimizer", saved: StateDict) -> None:
    """Refuse settings that the optimizer would not have been built with."""
    merged = []
    for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        ours = {name: own[name] for name in ("params", "fused") if name in own}
        group = {**own, **theirs, **ours}
        check_lr(group["lr"], rounding=ROUNDING)
        merged.append({**group, "lr": 1.0})  # what follows lr keeps its saved share, where lr ended at 0 too
    for group in merged:
        optimizer._check_group(group)
        optimizer._check_common(group, merged[0])


def _check_form(kind: str, number: int, own: Group, theirs: Group) -> None:
    known = (*LARS_FORMS, *LAMB_FORMS)  # others are refused as settings
    if "form" in own and theirs.get("form", own["form"]) != own["form"] and theirs["form"] in known:
        raise ValueError(
            f"group {number} of this state was trained with form {theirs['form']!r}, and this {kind} has form "
            f"{own['form']!r}: build the {kind} with form={theirs['form']!r}. To change it on purpose, write "
            f"{own['form']!r} into the saved group; its other settings stay as they were saved."
        )


def _check_states(optimizer: "ExcludingOptimizer", saved: StateDict) -> None:
    own_sizes, sizes = (
        [len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if own_sizes != sizes:
        return  # torch says so next
    for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for index, key in enumerate(theirs["params"]):
            if state := saved["state"].get(key):  # without one, a parameter begins anew
                _check_state(optimizer, own, index, state)


def _check_state(optimizer: "ExcludingOptimizer", group: Group, index: int, state: Mapping[str, Any]) -> None:
    needed = optimizer._state_names(group, index)
    if missing := [name for name in needed if name not in state]:
        raise ValueError(
            f"the saved state of {call_it(group, index)} has no {missing[0]!r}, and {type(optimizer).__name__} "
            f"continues from {', '.join(map(repr, needed))} together: load a whole state, or remove the parameter's "
            "entry to begin it anew."
        )
    shape = tuple(group["params"][index].shape)
    for name in (*needed, *(["master"] if "master" in state else [])):
        value = state[name]
        fits = isinstance(value, Tensor) and (value.numel() == 1 if name == "step" else tuple(value.shape) == shape)
        if not fits:
            rule = "a tensor of one number" if name == "step" else f"a tensor of the parameter's shape {shape}"
            got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"{name!r} in the saved state of {call_it(group, index)} must be {rule}, got {got}: load the state of "
                "the same model, or remove the parameter's entry to begin it anew."
            )


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
