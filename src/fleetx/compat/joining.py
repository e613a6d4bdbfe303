"""`fleet.init(role)`: how a script of the guide joins its job."""

from typing import Any

from fleetx import fleet


class PaddleCloudRoleMaker:
    """Who this worker is comes from the launcher's environment; there is nothing to make."""

    def __init__(self, is_collective: bool = False) -> None:
        if is_collective is not True:
            raise ValueError(
                f"PaddleCloudRoleMaker(is_collective={is_collective!r}) means parameter servers, which FleetX does not "
                "have. Write PaddleCloudRoleMaker(is_collective=True)."
            )


def init(role_maker: Any = None, is_collective: bool = True) -> None:
    """Join the job; the role says nothing that the environment does not."""
    if role_maker is not None and not isinstance(role_maker, PaddleCloudRoleMaker):
        given = role_maker.__name__ if isinstance(role_maker, type) else type(role_maker).__name__
        raise TypeError(
            f"fleet.init takes a role made by role_maker.PaddleCloudRoleMaker(is_collective=True), or nothing; got "
            f"{given}."
        )
    fleet.init(is_collective=is_collective)
