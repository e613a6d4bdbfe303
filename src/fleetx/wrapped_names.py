"""Names with and without what wrappers put before them: `module.` of DistributedDataParallel, `_orig_mod.` of compile.

A wrapper stands before all names of its model, so a name or pattern means the same with it and without.
"""

from collections.abc import Callable, Iterable, Sequence

WRAPPERS = ("module.", "_orig_mod.")


def unwrapped(names: Sequence[str]) -> list[str]:
    """The names without the wrappers that stand before all of them."""
    before = _before_all(names)
    return [name.removeprefix(before) for name in names]


def unwrapped_pattern(pattern: str, plain: Iterable[str]) -> str:
    """A pattern of names without the wrappers before it, unless one of the names has that itself."""
    known = list(plain)
    while wrapper := next((one for one in WRAPPERS if pattern.startswith(one) and pattern != one), ""):
        if any(name.startswith(wrapper) for name in known):
            break
        pattern = pattern.removeprefix(wrapper)
    return pattern


def unwrapped_orders(*orders: Sequence[Sequence[str | None]]) -> list[list[list[str | None]]]:
    """The same for names by groups, where some may be unknown; each order has wrappers of its own."""
    done = []
    for groups in orders:
        plain = iter(unwrapped([name for names in groups for name in names if name is not None]))
        done.append([[None if name is None else next(plain) for name in names] for names in groups])
    return done


def modules_called(pattern: str, modules: Iterable[str], fits: Callable[[str, str], bool]) -> list[str]:
    """Which of all names of a model's modules fit a pattern, where wrappers before them count in neither.

    If none does, names count as they are.
    """
    names = list(modules)
    wrapper = _before_all([f"{name}." for name in names if name])
    # The wrappers themselves are no part of the model, which is called as they are, without the dot.
    plain = {name: f"{name}.".removeprefix(wrapper).rstrip(".") for name in names if f"{name}.".startswith(wrapper)}
    asked = unwrapped_pattern(pattern, plain.values())
    found = [name for name, short in plain.items() if fits(short, asked)]
    return found or [name for name in names if fits(name, pattern)]


def _before_all(names: Sequence[str]) -> str:
    """The wrappers before all names, the outermost first; names of wrappers themselves end with a dot."""
    before, inside = "", list(names)
    while wrapper := next((one for one in WRAPPERS if inside and all(name.startswith(one) for name in inside)), ""):
        before += wrapper
        inside = [name.removeprefix(wrapper) for name in inside if name != wrapper]
    return before
