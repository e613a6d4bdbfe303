"""How FleetX speaks to its user: a notice comes once, and problems come all at once."""

import difflib
import logging
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

from fleetx.comm.launched import torch_variables

_told: set[str] = set()
_is_quiet = ContextVar("fleetx_is_quiet", default=False)
_MOST_SHOWN = 20


def tell_once(topic: str, message: str) -> None:
    """Log a warning to the "fleetx" logger: once per topic and process, and on the first worker only."""
    if topic in _told or _is_quiet.get():
        return
    _told.add(topic)
    if _is_first_worker():
        logging.getLogger("fleetx").warning(message)


def _is_first_worker() -> bool:
    """By the process group, else by the launcher. Nothing is imported for it: a strategy needs no torch."""
    world = sys.modules.get("fleetx.comm.world")
    return world.is_first() if world else torch_variables().get("RANK", "0") == "0"


def is_quiet() -> bool:
    """Whether nothing is to be told now."""
    return _is_quiet.get()


@contextmanager
def quiet() -> Generator[None]:
    """Inside, nothing is told, and nothing counts as told: where FleetX looks at a model in a way nobody trains it."""
    before = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(before)


class Problems:
    """What is wrong with some settings, gathered so that a user sees all of it at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._only_types = True

    def add(self, message: str) -> None:
        """A problem in its own words: rule, value and remedy."""
        self.messages.append(message)
        self._only_types = False

    def wrong_type(self, path: str, rule: str, value: object, remedy: str) -> None:
        """A value of the wrong type."""
        self.messages.append(f"{path} must be {rule}, got {shown(value)} ({type(value).__name__}); {remedy}")

    def wrong_value(self, path: str, rule: str, value: object, remedy: str) -> None:
        """A value of the right type that the rule forbids."""
        self.add(f"{path} must be {rule}, got {shown(value)}; {remedy}")

    def raise_if_any(self, where: str = "") -> None:
        """Raise one error that holds them all: a TypeError if all are about types, else a ValueError."""
        if not self.messages:
            return
        kind = TypeError if self._only_types else ValueError
        if len(self.messages) == 1:
            raise kind(f"{where}: {self.messages[0]}" if where else self.messages[0])
        lines = [f"{where or 'these settings'}: {len(self.messages)} problems", *self.messages[:_MOST_SHOWN]]
        if len(self.messages) > _MOST_SHOWN:
            lines.append(f"and {len(self.messages) - _MOST_SHOWN} more")
        raise kind("\n  - ".join(lines))


def shown(value: object) -> str:
    """The value as Python writes it, kept short: it may be anything, even something that has no repr."""
    try:
        text = repr(value)
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The remedy for an unknown name: the nearest valid one, or all of them when none is near."""
    by_lower = {one.lower(): one for one in valid}
    # Cut, because the search takes time in the square of the length.
    near = difflib.get_close_matches(name[:80].lower(), by_lower, n=1)
    return f"did you mean {by_lower[near[0]]!r}?" if near else f"valid names: {', '.join(by_lower.values())}"
