"""A module of Paddle's, as far as FleetX has it."""

from typing import Any

from fleetx.notices import did_you_mean


class Names:
    """Names under one roof; one that is not there raises with the nearest, or with all that are."""

    def __init__(self, module: str, **names: Any) -> None:
        vars(self).update(names)
        self.__name__ = module

    def __getattr__(self, name: str) -> Any:
        there = [known for known in vars(self) if not known.startswith("_")]
        raise AttributeError(
            f"{self.__name__} has no {name!r} in FleetX, which takes over what the guide's scripts use; "
            + did_you_mean(name, there)
        )

    def __dir__(self) -> list[str]:
        return sorted(vars(self))

    def __repr__(self) -> str:
        return f"<{self.__name__} of fleetx.compat>"
