"""A clock that a test sets by hand, in the place of `fleetx.clock`'s."""

from types import SimpleNamespace

from fleetx import clock


class HandClock:
    """Stands still unless it is moved."""

    def __init__(self):
        self.now = 0.0

    def install(self, patch):
        patch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: float(self.now)))
        return self
