"""Running statistics of batch norms: who may read what they count.

A batch norm in training writes its statistics and does not read them. Another module may, such as the one around it:
nobody sees that in a forward, so its code is searched for their names.
"""

from collections.abc import Iterator
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NAMES = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_ALL = frozenset({"buffers", "named_buffers", "_buffers", "state_dict", "getattr"})  # which give any buffer


def is_counting(owner: nn.Module) -> bool:
    """Whether it is a batch norm of torch's that keeps statistics, which its own forward does not read."""
    if not isinstance(owner, _NormBase) or not owner.training or not owner.track_running_stats:
        return False
    given = vars(owner).get("forward")  # a partial is the compiled one, for a while
    return _is_torchs(type(owner).forward) and (given is None or isinstance(given, partial))


def may_read_statistics(modules: list[nn.Module]) -> bool:
    """Whether one of these modules may read what a batch norm among them counts."""
    return any(_mentions_statistics(type(one)) for one in modules)


@cache
def _mentions_statistics(kind: type) -> bool:
    """Whether a class of somebody's, or a function that it may call, has the name of a statistic in its code."""
    own = [one for one in kind.__mro__ if not one.__module__.startswith("torch.") and one is not object]
    waiting = [value for one in own for value in vars(one).values()]
    seen: set[FunctionType] = set()
    while waiting:
        function = _function_of(waiting.pop())
        if function is None or function in seen or _is_torchs(function):
            continue
        seen.add(function)
        names = {name for code in _codes(function.__code__) for name in (*code.co_names, *_strings(code))}
        if names & (_NAMES | _ALL):
            return True
        waiting += [function.__globals__.get(name) for name in names]
    return False


def _function_of(value: Any) -> FunctionType | None:
    """What a method, a property or something that is wrapped runs."""
    value = getattr(value, "__func__", getattr(value, "fget", value))
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code and all that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _strings(code: CodeType) -> Iterator[str]:
    return (constant for constant in code.co_consts if isinstance(constant, str))


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("torch.")
