"""What a user hands an optimizer, refused where torch and Python would take it silently or name no remedy."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from fleetx.notices import did_you_mean, shown
from fleetx.optim.groups import Group

# What torch, its schedulers and those of others keep in a group beside an optimizer's settings.
BOOKKEEPING = frozenset(
    {
        "params",
        "param_names",
        "name",
        "initial_lr",
        "lr_scale",
        "max_lr",
        "min_lr",
        "base_momentum",
        "max_momentum",
        "swa_lr",
    }
)
# Names that others have for a setting of ours, and that are not like it.
ELSEWHERE = {"use_muon": "exclude_from_muon", "trust_coeff": "lars_coeff", "trust_coefficient": "lars_coeff"}


def check_params(kind: str, params: Any) -> Any:
    """The parameters or groups as a list; refuse a module, and nothing at all."""
    if isinstance(params, nn.Module):
        raise TypeError(
            f"{kind} takes parameters, got the module {type(params).__name__}: give model.named_parameters() or "
            "model.parameters()."
        )
    if not isinstance(params, Iterable) or isinstance(params, Mapping) or hasattr(params, "shape"):
        return params  # torch's own message says what it must be
    found = list(params)
    if not found:
        raise ValueError(
            f"{kind} needs at least one parameter, got an empty list: call model.parameters() anew if it was a "
            "generator that something else used up, and look whether a filter left nothing."
        )
    return found


def check_keys(kind: str, group: Group, known: Collection[str]) -> None:
    """Refuse what a group says and nobody would read."""
    for key in group:
        if key not in known and key not in BOOKKEEPING:
            raise ValueError(
                f"a parameter group of {kind} has no setting {key!r}, so {shown(group[key])} would change nothing "
                f"(a note of your own may stand under 'name'): {_remedy(key, known)}"
            )


def check_keywords(cls: type, settings: Mapping[str, Any]) -> None:
    """Refuse an argument that the constructor does not have."""
    parameters = inspect.signature(cls.__init__).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in settings:
        if name not in parameters:
            known = [known for known in parameters if known != "self"]
            raise TypeError(f"{cls.__name__} has no argument {name!r}: {_remedy(name, known)}")


def _remedy(name: str, known: Collection[str]) -> str:
    meant = ELSEWHERE.get(name)
    return f"did you mean {meant!r}?" if meant in known else did_you_mean(name, known)
