"""What workers that plan together agree on; a worker alone agrees with itself."""

from typing import Any

from fleetx.planner.costs import Profile
from fleetx.planner.making import plan_for
from fleetx.planner.plan import Plan


class Agreement:
    """One worker. Several of them have an agreement that derives from this one, and call its methods together.

    A forward in which workers wait for each other must run as often on each, whatever its clock, its free memory and
    its disk say: what decides about that is agreed on.
    """

    def everywhere(self, so_here: bool) -> bool:
        """Whether something is so on all workers."""
        return so_here

    def largest(self, number: int) -> int:
        """The largest of all workers' numbers."""
        return number

    def first(self, names: list[list[str]]) -> list[list[str]]:
        """The first worker's."""
        return names

    def plan_for(self, profile: Profile, **question: Any) -> Plan:
        """The same plan for all workers."""
        return plan_for(profile, **question)


ALONE = Agreement()
