"""examples/clusters/train.py with loading processes, disturbed once: in the first attempt, after so many batches.

DISTURB is "die RANK BATCHES", or "hold BATCHES": then all workers wait there until one of them was asked to leave. What
happened is noted by files in the folder NOTES.
"""

import functools
import os
import runpy
import signal
import time
from pathlib import Path

import fleetx.data
from fleetx import fleet
from fleetx.comm import stopping

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "clusters" / "train.py"
ask = fleet.stop_requested
asked = 0


def is_first_time(note):
    try:
        Path(os.environ["NOTES"], note).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die(rank, batches):
    if asked == int(batches) and fleet.worker_index() == int(rank) and is_first_time("died"):
        os.kill(os.getpid(), signal.SIGKILL)


def hold(batches):
    released = Path(os.environ["NOTES"], "released")
    if asked == int(batches) and is_first_time(f"held.{fleet.worker_index()}"):
        while not released.exists():
            if stopping.is_wanted():
                released.touch()
            time.sleep(0.01)


def stop_requested():
    global asked
    asked += 1
    how, *numbers = os.environ["DISTURB"].split()
    {"die": die, "hold": hold}[how](*numbers)
    return ask()


fleet.stop_requested = stop_requested
fleetx.data.Loader = functools.partial(fleetx.data.Loader, num_workers=1)
runpy.run_path(str(SCRIPT), run_name="__main__")
