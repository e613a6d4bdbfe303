"""The launcher's own words."""

import errno
import sys
from collections.abc import Iterable
from typing import TextIO

from fleetx.standard_streams import silence


class LaunchError(Exception):
    """The job cannot be started as asked; the message says what to do."""


def say(text: str) -> None:
    """One line on stderr, apart from what workers print."""
    show(f"fleetrun: {text}\n", sys.stderr)


def full_stop(text: str) -> str:
    """As a sentence that ends with one full stop: messages of others may bring their own, or none."""
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text.rstrip(':;, ')}."


def named(ranks: Iterable[int]) -> str:
    """`worker 1`, or `workers 0, 1`."""
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def show(text: str, console: TextIO) -> None:
    """Print as long as somebody listens: a terminal that was closed must not end the job, whose workers may save."""
    try:
        console.write(text)
        console.flush()
    except (OSError, ValueError) as error:
        silence(console)
        if console is sys.stdout and isinstance(error, OSError) and error.errno != errno.EPIPE:
            say(f"the standard output cannot be written ({error.strerror}): nothing more is shown, the job goes on.")
