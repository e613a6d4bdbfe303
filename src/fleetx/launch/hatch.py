"""The first thing that a nursery runs: it must not outlive its launcher while it imports torch, which takes seconds.

This is a program of its own, which imports nothing of FleetX before the kernel has been told.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Take the launcher's process id from the arguments, and become a nursery."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv.pop(1)):
        sys.exit("the launcher is gone already")
    sys.path[0] = os.getcwd()  # noqa: PTH109 - as python -m has it; this folder's modules are not for everybody
    from fleetx.launch import nursery

    nursery.main()


if __name__ == "__main__":
    main()
