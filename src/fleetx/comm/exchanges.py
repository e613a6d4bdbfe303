"""What a forward learns from the other workers: noted while it runs, and given again when it is repeated.

A segment that is recomputed in the backward must not send its messages a second time: that would take time, and
workers that keep this segment's activations would not answer.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_noted: ContextVar[list[Tensor] | None] = ContextVar("fleetx_exchanges_noted", default=None)
_given: ContextVar[Iterator[Tensor] | None] = ContextVar("fleetx_exchanges_given", default=None)


def exchanged(exchange: Callable[[], Tensor]) -> Tensor:
    """What `exchange` gives; in a repeated forward, what it gave the first time, without a call."""
    given = _given.get()
    result = exchange() if given is None else next(given, None)
    if result is None:
        raise RuntimeError(
            "a module asked the other workers for more statistics when its forward was repeated in the backward than "
            "before, and they do not answer now. Leave that module out of recompute, or make its forward depend on its "
            "inputs only."
        )
    noted = _noted.get()
    if noted is not None:
        noted.append(result)
    return result


@contextmanager
def noting() -> Generator[list[Tensor]]:
    """While active, append what is exchanged to the returned list, and to that of an enclosing context."""
    outer, own = _noted.get(), list[Tensor]()
    _noted.set(own)
    try:
        yield own
    finally:
        _noted.set(outer)
        if outer is not None:
            outer.extend(own)


@contextmanager
def giving(noted: list[Tensor]) -> Generator[None]:
    """Inside, nothing is exchanged: each `exchanged` gives the next of what was noted."""
    outer = _given.get()
    _given.set(iter(noted))
    try:
        yield
    finally:
        _given.set(outer)
