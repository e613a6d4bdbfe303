"""The launcher's own words."""

import sys


class LaunchError(Exception):
    """The job cannot be started as asked; the message says what to do."""


def say(text: str) -> None:
    """One line on stderr, apart from what workers print."""
    print(f"fleetrun: {text}", file=sys.stderr, flush=True)
