"""Taking another optimizer's place, on its own groups."""

from typing import Any, TypeVar

from torch.optim.optimizer import Optimizer

Ours = TypeVar("Ours", bound=Optimizer)


def sharing(cls: type[Ours], wrapped: Optimizer, theirs: tuple[str, ...], settings: dict[str, Any]) -> Ours:
    """Ours on the very list and dicts of the wrapped one, so that what is bound to it keeps working.

    ``theirs`` are settings of the wrapped one, which must not be given again.
    """
    if taken := [name for name in theirs if name in settings]:
        kind = type(wrapped).__name__
        raise TypeError(f"{', '.join(taken)} is the wrapped {kind}'s: give it to {kind}, and leave it out here.")
    _check_unused(cls.__name__, wrapped)
    before = [dict(group) for group in wrapped.param_groups]
    for group in wrapped.param_groups:
        group.pop("fused", None)  # its own choice of kernels says nothing about ours
    try:
        ours: Any = cls.__new__(cls, **settings)
        ours._replaced = wrapped  # before the groups are read, since they hold its settings too
        ours.__init__(wrapped.param_groups, **{"lr": wrapped.defaults["lr"], **settings})
    except Exception:
        for group, old in zip(wrapped.param_groups, before, strict=True):
            group.clear()
            group.update(old)
        raise
    ours.param_groups = wrapped.param_groups
    return ours


def _check_unused(name: str, wrapped: Optimizer) -> None:
    kind = type(wrapped).__name__
    if any("decays" in group for group in wrapped.param_groups):
        raise ValueError(f"an optimizer can be replaced once, and this {kind} was already: build a new {kind}.")
    if wrapped.state:
        raise ValueError(
            f"{name} replaces an optimizer before its first step, and this {kind} has state of "
            f"{len(wrapped.state)} parameters: replace it first, then load what a {name} saved."
        )
