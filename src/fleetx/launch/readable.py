"""Which sockets have something to read. `select.select` raises for file descriptors from 1,024 on; this does not."""

import selectors
from collections.abc import Iterable
from typing import Any, Protocol


class HasFileno(Protocol):
    """A socket, or what holds one."""

    def fileno(self) -> int:
        """Its file descriptor."""
        ...


def readable(sockets: Iterable[HasFileno], wait: float) -> list[Any]:
    """Those that can be read, or accepted from, within `wait` seconds."""
    with selectors.PollSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(wait)]
