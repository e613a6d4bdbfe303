"""The first thing that a nursery runs: it must not outlive its launcher while it imports torch, which takes seconds.

This is a program of its own, which imports nothing of FleetX before the kernel has been told.
"""

import ctypes
import os
import shutil
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Take the launcher's process id from the arguments, and become a nursery."""
    launcher, folder = int(sys.argv.pop(1)), sys.argv[2]

    def leave_if_alone(_number: int = 0, _frame: FrameType | None = None) -> None:
        if os.getppid() != launcher:  # it could not remove its folder of temporary files
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it came from somebody else
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave_if_alone)  # until the nursery is ready, and notices by itself
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:
        leave_if_alone()
    sys.path[0] = os.getcwd()  # noqa: PTH109 - as python -m has it; this folder's modules are not for everybody
    from fleetx.launch import nursery

    nursery.main()


if __name__ == "__main__":
    main()
