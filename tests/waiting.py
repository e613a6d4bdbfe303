"""Wait for what another process or thread does. The guard says nothing of speed: it ends a test that would hang."""

import time

GUARD = 120.0


def wait_for(condition, what, guard=GUARD):
    """Until the condition gives something true; returns that."""
    end = time.monotonic() + guard
    while not (found := condition()):
        assert time.monotonic() < end, f"no {what() if callable(what) else what} within {guard:g} s"
        time.sleep(0.01)
    return found
