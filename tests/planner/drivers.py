"""Drivers for tests of what a driver calls: plans and trials come from functions."""

from fleetx.planner.agreement import ALONE, Agreement
from fleetx.planner.verify import tried_out


class FakeDriver:
    """Makes plans with `make`; tries them out on a tryout, or with `run`."""

    def __init__(self, make, tryout=None, agreement=ALONE, run=None):
        self.make, self.tryout, self.agreement, self.run_here = make, tryout, agreement, run

    def plan_from(self, profile, prefer=None):
        return self.make(profile) if prefer is None else self.make(profile, prefer=prefer)

    def run(self, plan, profile):
        return tried_out(plan, profile, self.tryout, self.agreement) if self.run_here is None else self.run_here(plan)

    def slowest(self, plan):
        return plan.measured.seconds


class Others(Agreement):
    """Other workers, of whom these functions say what they have."""

    def __init__(self, largest=int, everywhere=None):
        self.largest = largest
        self.everywhere = everywhere or (lambda so_here: not largest(int(not so_here)))
