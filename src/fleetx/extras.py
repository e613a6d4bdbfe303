"""Packages that only some features need: each belongs to an extra, and its absence is an error that names the extra."""

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


@contextmanager
def needs_extra(extra: str, feature: str) -> Iterator[None]:
    """Import an extra's packages inside this context: if one is missing, the error says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        raise MissingExtraError(
            f"{feature} needs {package}, which is not installed: pip install 'fleetx[{extra}]'.", name=error.name
        ) from None
