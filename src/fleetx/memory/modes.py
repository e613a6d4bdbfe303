"""In which way a model runs: which modules train, and what is hooked to each. What is proven, is proven of one way."""

import itertools
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

_MOST = 32  # ways that are remembered
_DEEPEST = 4  # functions in functions are looked at so far


class Modes:
    """Numbers for the ways in which a model was seen to run.

    Hooks are told by their code: who hooks and unhooks the same in each step runs in the same way each time.
    """

    def __init__(self) -> None:
        self._by_handles: dict[Any, int] = {}  # found quickly, as long as the hooks stay
        self._by_code: dict[Any, int] = {}
        self._numbers = itertools.count()

    def number_of(self, modules: list[nn.Module]) -> int:
        """That of the present way."""
        present = tuple((one.training, *one._forward_pre_hooks, None, *one._forward_hooks) for one in modules)
        number = self._by_handles.get(present)
        if number is None:
            number = self._by_handles[present] = self._number_of_code(modules)
            if len(self._by_handles) > _MOST:
                self._by_handles = {}
        return number

    def _number_of_code(self, modules: list[nn.Module]) -> int:
        way = tuple(
            (one.training, *_codes(one._forward_pre_hooks), None, *_codes(one._forward_hooks)) for one in modules
        )
        if way not in self._by_code:
            if len(self._by_code) >= _MOST:
                self._by_code = {}
            self._by_code[way] = next(self._numbers)
        return self._by_code[way]


_KINDS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
Hooked = list[tuple[nn.Module, list[dict[int, Any]] | None]]
"""Modules with the hooks that each has, by kind; None where it has none."""


def hooked_to(modules: list[nn.Module]) -> Hooked:
    """What is hooked to the modules."""
    return [(one, _hooks_of(one) if one._forward_hooks or one._forward_pre_hooks else None) for one in modules]


def rehook(before: Hooked) -> Hooked:
    """From now on the modules have these hooks; gives those that were others, with what they had."""
    changed = [one for one in before if _differs(*one)]
    present = hooked_to([module for module, _ in changed])
    for module, hooks in changed:
        for place, kind in enumerate(_KINDS):
            held = vars(module)[kind]
            held.clear()
            held.update({} if hooks is None else hooks[place])
    return present


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [dict(vars(module)[kind]) for kind in _KINDS]


def _differs(module: nn.Module, hooks: list[dict[int, Any]] | None) -> bool:
    before, after = module._forward_pre_hooks, module._forward_hooks
    if hooks is None:
        return bool(before or after)
    return before.keys() != hooks[0].keys() or after.keys() != hooks[1].keys()


def _codes(hooks: Mapping[int, Any]) -> list[Any]:
    return [_code(hook) for hook in hooks.values()]


def _code(hook: Any, depth: int = 0) -> Any:
    """What a hook does: its code, and that of the functions that it was made with."""
    if isinstance(hook, nn.Module) or depth > _DEEPEST:
        return type(hook)
    if isinstance(hook, partial):
        held = [hook.func, *hook.args, *hook.keywords.values()]
        return (partial, *(_code(one, depth + 1) for one in held if callable(one)))
    function = getattr(hook, "__func__", hook)  # that of a bound method
    held = [getattr(hook, "__self__", None), *_in_closure(function)]
    if not hasattr(function, "__code__"):
        held += getattr(function, "__dict__", {}).values()
    within = tuple(_code(one, depth + 1) for one in held if callable(one) and one is not hook)
    return getattr(function, "__code__", type(function)), within


def _in_closure(function: Any) -> list[Any]:
    cells = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is still empty
            cells.append(cell.cell_contents)
    return cells
