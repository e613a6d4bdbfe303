"""What a parameter group says of its parameters: their names, and the precision they are updated in."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleetx import names
from fleetx.names import ParameterInfo
from fleetx.numbers import LOW_PRECISION
from fleetx.optim.checks import check_number

Group = dict[str, Any]
State = dict[str, Tensor]

LR_SHARES = ("excluded_lr", "zero_norm_lr")
"""Settings of Lars and Lamb that are learning rates too, kept as multiples of lr."""

DTYPES = (*LOW_PRECISION, torch.float32, torch.float64)


def working_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of a parameter's state and arithmetic: fp32 for low precision, else its own."""
    return torch.float32 if parameter.dtype in LOW_PRECISION else parameter.dtype


def infos(groups: Sequence[Group]) -> list[ParameterInfo | None]:
    """Name and kinds of every parameter of the groups, None where nothing is known."""
    return [_info(group, index) for group in groups for index in range(len(group["params"]))]


def call_it(group: Group, index: int) -> str:
    """How an error calls a parameter: by its name if it has one."""
    known = _info(group, index)
    return repr(known.name) if known else f"parameter {index} of its group"


def fix_lr_shares(group: Group, *settings: str) -> None:
    """Keep learning rates beside lr as multiples of it, so that schedules, which know only lr, move them too."""
    for setting in settings:
        if group[setting] is None:
            group.pop(f"{setting}_ratio", None)
            continue
        check_number(setting, group[setting], usual="leave it out to use lr")
        if f"{setting}_ratio" in group:
            continue
        lr = float(group.get("initial_lr", group["lr"]))
        if lr == 0:
            raise ValueError(
                f"{setting}={group[setting]!r} follows the schedule as a multiple of lr, and lr is 0: "
                "give the peak learning rate as lr and let the schedule begin at 0."
            )
        group[f"{setting}_ratio"] = group[setting] / lr


def _info(group: Group, index: int) -> ParameterInfo | None:
    recorded = names.info(group["params"][index])
    if "param_names" not in group:
        return recorded
    given = group["param_names"][index]  # what the user called it now comes before what was recorded
    return replace(recorded, name=given) if recorded else ParameterInfo(given)
