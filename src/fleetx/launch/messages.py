"""What launchers say to each other: each value is checked before it is used, and odd ones end the connection alone."""

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, Union, get_args, get_origin

from fleetx.launch.channel import StrangerError

# More workers than any machine has; a number without a limit would fill the leader's memory.
_MOST_WORKERS = 4096


class OddMessageError(StrangerError):
    """The other side knows the secret, and says what no launcher of this version would."""


@dataclass(frozen=True)
class Joined:
    """What a machine says of itself when it joins."""

    host: str
    workers: int
    address: str
    interface: str | None
    rank: int | None
    job_id: str | None
    versions: dict[str, str]

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MOST_WORKERS:
            raise ValueError(f"workers must be from 1 to {_MOST_WORKERS}, not {self.workers}")
        if self.rank is not None and self.rank < 0:
            raise ValueError(f"rank must be at least 0, not {self.rank}")


def understood(peer: str, message: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a message, each as its kind: a type, a list or dictionary of types, a dataclass, a named tuple.

    What we do not know is left out: another version may say more.
    """
    try:
        return {name: _as(kinds[name], value) for name, value in message.items() if name in kinds}
    except (ValueError, RecursionError) as error:
        raise OddMessageError(f"{peer} sent what is no message of FleetX ({error})") from error


def _as(kind: Any, value: Any) -> Any:
    inner = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _as(next(one for one in inner if one is not types.NoneType), value)
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    if get_origin(kind) is list and isinstance(value, list):
        return [_as(inner[0], one) for one in value]
    if get_origin(kind) is dict and isinstance(value, dict):
        # The keys of JSON are text, whatever they were.
        return {(int(key) if inner[0] is int else key): _as(inner[1], one) for key, one in value.items()}
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        ours = {field.name: field for field in fields(kind)}
        needed = {name for name, one in ours.items() if one.default is MISSING and one.default_factory is MISSING}
        if needed <= value.keys():
            return kind(**{name: _as(field.type, value[name]) for name, field in ours.items() if name in value})
    if hasattr(kind, "_fields") and isinstance(value, list) and len(value) == len(kind._fields):
        return kind(*(_as(one, part) for one, part in zip(kind.__annotations__.values(), value, strict=True)))
    raise ValueError(f"{getattr(kind, '__name__', kind)} expected, got {repr(value)[:80]}")
