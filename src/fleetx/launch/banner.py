"""The guide's block of arguments."""

from collections.abc import Mapping

_HEAD = "-----------  Configuration Arguments -----------"


def configuration(arguments: Mapping[str, object]) -> str:
    """Names and values, in the order of the alphabet as in the guide."""
    lines = [f"{name}: {value}" for name, value in sorted(arguments.items())]
    return "\n".join([_HEAD, *lines, "-" * len(_HEAD)])
