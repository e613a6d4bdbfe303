"""States that timm's and apex's LARS and LAMB saved, in the words of ours.

| theirs | ours |
|---|---|
| ``weight_decay``, ``trust_coeff`` or ``trust_coefficient``, ``eps`` of LARS | ``lars_…`` or ``lamb_weight_decay``, ``lars_coeff``, ``epsilon`` |
| ``step`` in the group or in each parameter's state, int or tensor | a tensor in each parameter's state |
| timm's momentum, lr outside: ``p −= lr·v`` | the same where lr is outside here, else ``lr·v`` |
| apex's momentum, lr inside and negated: ``p += v`` | ``−v`` where lr is inside here, else ``−v/lr`` |

lr is the one in the saved group. While it changes, a buffer with lr inside and one without are not multiples of each
other: the conversion is exact where lr was constant, and otherwise as near as one number can be.

What ours cannot do is refused: nesterov, dampening, clipping of ratios and the like. Who has decay and a trust ratio
is this optimizer's own business; a saved group that had it otherwise is refused too, with the setting that mends it.
"""  # noqa: E501

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict

from fleetx.optim.groups import Group, call_it

if TYPE_CHECKING:
    from fleetx.optim.layerwise import LayerwiseOptimizer

# What ours always does: any other value means a formula that ours has not.
ONLY = {
    "dampening": 0,
    "nesterov": False,
    "trust_clip": False,
    "caution": False,
    "decoupled_decay": False,
    "corrected_weight_decay": False,
    "grad_averaging": True,
    "amsgrad": False,
    "adam_w_mode": True,
}
LARS_NAMES = {"weight_decay": "lars_weight_decay", "eps": "epsilon", "momentum": "momentum"}
LARS_COEFFS = ("trust_coeff", "trust_coefficient")
LAMB_NAMES = {
    name: name for name in ("betas", "eps", "bias_correction", "max_grad_norm", "always_adapt")
} | {"weight_decay": "lamb_weight_decay"}  # fmt: skip


def converted(optimizer: "LayerwiseOptimizer", saved: StateDict) -> StateDict:
    """The state in our words, if timm or apex saved it; any other as it is."""
    groups = saved["param_groups"]
    algorithm = optimizer._kernels
    if not groups or any(_origin(group) != algorithm for group in groups):
        return saved
    state: dict[Any, Any] = {}
    translated = []
    for number, (own, theirs) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
        _refuse_other_formulas(algorithm, number, theirs)
        group = _group(algorithm, own, theirs)
        _refuse_other_exclusions(optimizer, number, {**own, **group}, theirs)
        translated.append(group)
        for key in theirs["params"]:
            if key in saved["state"]:
                state[key] = _state(algorithm, own, theirs, saved["state"][key])
    return {**saved, "state": state, "param_groups": [*translated, *groups[len(translated) :]]}


def _origin(group: Group) -> str | None:
    """The algorithm of a group that is not ours; None for all others."""
    if "decays" in group:
        return None
    if "trust_coeff" in group or "trust_coefficient" in group:
        return "lars"
    return "lamb" if "grad_averaging" in group else None


def _group(algorithm: str, own: Group, theirs: Group) -> Group:
    names = LARS_NAMES if algorithm == "lars" else LAMB_NAMES
    group = {ours: theirs[name] for name, ours in names.items() if name in theirs}
    if algorithm == "lars":
        group["lars_coeff"] = next(theirs[name] for name in LARS_COEFFS if name in theirs)
    if "betas" in group:
        group["betas"] = tuple(group["betas"])
    kept = {name: theirs[name] for name in ("params", "lr", "initial_lr", "param_names") if name in theirs}
    masks = ("decays", "adapts", "exclude_from_weight_decay", "exclude_from_adaptation")
    return {**kept, **group, **{name: own[name] for name in masks}}


def _state(algorithm: str, own: Group, theirs: Group, state: dict[str, Any]) -> dict[str, Any]:
    if algorithm == "lars":
        buffer = state.get("momentum_buffer")
        return {} if buffer is None else {"momentum_buffer": _momentum(own, theirs, buffer)}
    moments = {name: state[name] for name in ("exp_avg", "exp_avg_sq") if name in state}  # one alone is refused later
    if not moments:
        return {}
    step = state.get("step", theirs.get("step"))
    if step is None:
        raise ValueError(
            "a LAMB state needs the number of its steps, and this one has 'step' neither in the group nor in the "
            "parameters' state: write it into the saved group."
        )
    return {**moments, "step": torch.as_tensor(step, dtype=torch.float32, device="cpu").reshape(()).clone()}


def _momentum(own: Group, theirs: Group, buffer: Tensor) -> Tensor:
    """The buffer with lr where ours has it, and with our sign."""
    negated = lr_inside = "trust_coefficient" in theirs  # apex's
    wide = buffer.detach().float() if buffer.dtype in (torch.float16, torch.bfloat16) else buffer.detach()
    factor = -1.0 if negated else 1.0
    if lr_inside == own["lr_in_momentum"]:
        return factor * wide
    lr = float(theirs["lr"])
    if lr == 0:
        raise ValueError(
            "a momentum buffer is converted by the learning rate it was saved with, and that is 0 here: write the "
            "last one above 0 into the saved group, or build this Lars with lr_in_momentum="
            f"{lr_inside}, which needs no conversion."
        )
    return wide * (factor * lr if own["lr_in_momentum"] else factor / lr)


def _refuse_other_formulas(algorithm: str, number: int, theirs: Group) -> None:
    for name, value in ONLY.items():
        if theirs.get(name, value) != value:
            raise ValueError(
                f"group {number} of this state was trained with {name}={theirs[name]!r}, which our "
                f"{algorithm.upper()} does not have: continue it where it began, or start anew with {value!r}."
            )


def _refuse_other_exclusions(optimizer: "LayerwiseOptimizer", number: int, group: Group, theirs: Group) -> None:
    """Who had decay and a trust ratio there must have them here."""
    for index in range(len(group["params"])):
        if index >= len(group["decays"]):
            return  # torch says next that sizes differ
        decay, adapts = optimizer._decay_and_adapts(group, index)
        if bool(decay) != bool(theirs["weight_decay"]):
            raise ValueError(
                f"group {number} of this state had weight decay for all its parameters, and "
                f"{call_it({**group, 'params': optimizer.param_groups[number]['params']}, index)} is excluded from it "
                "here: build the optimizer with the saved groups, and without exclude_from_weight_decay."
            )
        adapted = _adapted(theirs, decay)
        if adapted is not None and adapted != adapts:
            listed = "exclude_from_adaptation=[]" if adapted else "exclude_from_adaptation, a list that takes them"
            raise ValueError(
                f"group {number} of this state had {'a' if adapted else 'no'} trust ratio, and here it has "
                f"{'one' if adapts else 'none'} (form {group['form']!r}): give form='timm', or {listed}."
            )


def _adapted(theirs: Group, decay: float) -> bool | None:
    """Whether a saved group had trust ratios; None if that was not saved."""
    if "is_skipped" in theirs:
        return not theirs["is_skipped"]
    if "always_adapt" in theirs:
        return bool(theirs["always_adapt"]) or decay != 0
    return True if decay != 0 else None  # apex saves no use_nvlamb
