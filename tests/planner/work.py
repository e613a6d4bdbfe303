"""How much a search computes, in counts that are the same on a busy machine and on an idle one."""

import sys

from fleetx.planner.states import States

_JOINED = States.joined.__func__.__code__


class Work:
    """While it is open, counts calls, and the partial choices that are looked at."""

    def __init__(self):
        self.calls = self.choices = 0

    def _note(self, frame, event, result):
        if event in ("call", "c_call"):
            self.calls += 1
        elif event == "return" and frame.f_code is _JOINED:
            self.choices += result.size

    def __enter__(self):
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(self._before)
