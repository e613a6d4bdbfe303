"""One damaged checkpoint: is it found, and is the one before it used?"""

import logging
import shutil
from functools import cache

from tests.checkpoint.damaging import damage
from tests.checkpoint.making import Parts, same

NEWEST = "save-000002-step-8"


@cache
def _original(folder):
    shutil.rmtree(folder, ignore_errors=True)
    parts = Parts(folder / "original").train(4)
    parts.saved(4)
    weights = parts.weights()
    parts.train(4).saved(8)
    shutil.copytree(folder / "original", folder / "copy")
    return weights, Parts(folder / "copy", seed=3)


def damaged_once(folder, kind, seed):
    weights, parts = _original(folder)
    newest = folder / "copy" / NEWEST
    what = damage(newest, kind, seed)
    logging.getLogger("fleetx").setLevel(logging.ERROR)  # each of 1,600 would be told
    start = parts.checkpoints.resume()
    found = start.step == 4 and start.passed_over[0].path == newest
    shutil.rmtree(newest)
    shutil.copytree(folder / "original" / NEWEST, newest)
    return {"ok": found and same(parts.weights(), weights), "what": what}
